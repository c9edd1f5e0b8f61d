// The logical -> physical tables of one request, as in figures 6 to 9 of the PagedAttention paper.

const PAGES_SHOWN = 96; // of one table; of a longer one the middle is left out
const SEQUENCES_SHOWN = 16;

const tables = { shown: "" };

function drawTables() {
  const request = state.requests.get(activeId()) ?? newestRunning();
  const folder = byId("tables");
  if (request === null) {
    if (tables.shown !== "") folder.replaceChildren();
    if (!folder.firstChild) {
      folder.append(element("p", "hint", "No request has blocks now. Run a prompt below, and watch its pages appear."));
    }
    tables.shown = "";
    byId("tables-summary").textContent = "logical to physical, by sequence";
    return;
  }
  const signature = JSON.stringify([request.request_id, request.sequences, countsOf(request)]);
  if (signature === tables.shown) return;
  tables.shown = signature;
  byId("tables-summary").textContent = summaryOf(request);
  paint(folder, request.colour);
  const { windows } = state.frame.kv;
  const parts = [];
  for (const sequence of request.sequences.slice(0, SEQUENCES_SHOWN)) {
    sequence.tables.forEach((table, group) => parts.push(drawTable(request, sequence, table, group, windows)));
  }
  const left = request.sequences.length - SEQUENCES_SHOWN;
  if (left > 0) parts.push(element("p", "hint", `and ${plural(left, "sequence")} more`));
  folder.replaceChildren(...parts);
}

// Running, and the latest to arrive: what a reader most likely has just started.
function newestRunning() {
  let found = null;
  for (const request of state.requests.values()) {
    const isBetter = request.status !== "pinned" || found === null; // prefixes come last
    if (request.blocks.size > 0 && isBetter) found = request;
  }
  return found;
}

const countsOf = (request) => [...request.blocks].map((block) => state.frame.kv.bytes[block]);

function summaryOf(request) {
  const cached = request.num_cached_tokens ? `, ${request.num_cached_tokens} of them from the cache` : "";
  const names = `${nameOf(request)} ${longNameOf(request)}`.trim();
  return `${names}: ${plural(request.num_prompt_tokens, "prompt token")}${cached}`;
}

function drawTable(request, sequence, table, group, windows) {
  const part = element("div", "sequence");
  const line = element("p");
  if (request.sequences.length > 1) line.append(element("b", "", `sequence ${sequence.index}`), " · ");
  if (windows.length > 1) {
    line.append(windows[group] === null ? "full attention · " : `window of ${windows[group]} tokens · `);
  }
  line.append(`${plural(sequence.num_stored_tokens, "token")} stored, ${sequence.num_output_tokens} generated`);
  if (table.length === 0) line.append(" · no blocks of its own yet");
  const pages = element("div", "pages");
  const cut = table.length > PAGES_SHOWN ? PAGES_SHOWN / 2 : table.length;
  table.forEach((block, logical) => {
    if (logical >= cut && logical < table.length - cut) {
      if (logical === cut) pages.append(element("span", "elided", `… ${table.length - 2 * cut} more …`));
      return;
    }
    pages.append(drawPage(sequence, group, block, logical));
  });
  part.append(line, pages);
  return part;
}

function drawPage(sequence, group, block, logical) {
  const page = element("div", block === 0 ? "page-of gone" : "page-of");
  page.append(element("span", "logical", `${logical}`), element("span", "physical", block === 0 ? "–" : `${block}`));
  if (block === 0) {
    page.title = `logical block ${logical}: the sliding window has passed it`;
    return page;
  }
  const { kv } = state.frame;
  const isLast = logical === sequence.tables[group].length - 1;
  const size = kv.block_sizes[group];
  const slots = isLast ? sequence.num_stored_tokens - logical * size : size;
  const count = kv.bytes[block];
  if (count > 1) page.append(element("span", "count", `×${count}`));
  const fill = element("i", "fill");
  fill.style.width = `${(100 * slots) / size}%`;
  page.append(fill);
  page.title = `logical block ${logical} is physical block ${block}: ${slots} of ${size} slots, ${plural(count, "owner")}`;
  page.addEventListener("pointerenter", () => pointAtBlock(block));
  page.addEventListener("pointerleave", () => pointAtBlock(null));
  return page;
}
