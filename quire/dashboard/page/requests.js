// The queues: running, preempted, waiting. Rows are kept from frame to frame, so that pointing at one is steady.

const QUEUES = [
  ["running", "Running", "nothing runs"],
  ["preempted", "Preempted", ""],
  ["swapped", "Swapped out", ""],
  ["waiting", "Waiting", ""],
  ["pinned", "Pinned prefixes", ""],
];
const ROWS_SHOWN = 50;

const ended = { shown: "", section: null, list: null, times: null, outcomes: null };
const rows = new Map(); // request id -> its button
const queues = new Map(); // status -> {section, count, list, more}

function buildQueues() {
  for (const [status, title, empty] of QUEUES) {
    const section = element("section", "queue");
    const count = element("span");
    const heading = element("h3", "", title);
    heading.append(count);
    const list = element("ul");
    const more = element("p", "more");
    const none = element("p", "none", empty);
    section.append(heading, list, more, none);
    byId("queues").append(section);
    queues.set(status, { section, count, list, more, none });
  }
  ended.section = element("section", "queue ended");
  ended.list = element("ul");
  ended.times = element("p", "more");
  ended.outcomes = element("p", "more outcomes");
  ended.section.append(element("h3", "", "Ended"), ended.times, ended.outcomes, ended.list);
  byId("queues").append(ended.section);
}

const secondsOf = (seconds) => {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`;
};
const REFUSALS = { max_num_queued_reqs: "the queue was full", max_num_queued_tokens: "too many tokens waited", rate_limit: "a key's limit" };

// How sequences have ended since the start, and what was refused or failed.
function outcomesOf({ outcomes, num_client_errors: ours, num_server_errors: failed }) {
  const parts = Object.entries(outcomes).map(([name, count]) =>
    name in REFUSALS ? `${count.toLocaleString("en")} refused (${REFUSALS[name]})` : `${count.toLocaleString("en")} ${name}`,
  );
  if (ours > 0) parts.push(`${plural(ours, "answer")} 4xx`);
  if (failed > 0) parts.push(`${plural(failed, "answer")} 5xx`);
  return parts.join(" · ");
}

// The latest requests that have ended, and what most of the last 200 took.
function drawEnded() {
  const { recent } = state.frame;
  const outcomes = outcomesOf(state.frame);
  const signature = JSON.stringify([recent, outcomes]);
  if (signature === ended.shown) return;
  ended.shown = signature;
  ended.section.hidden = recent.ended.length === 0 && outcomes === "";
  ended.outcomes.textContent = outcomes;
  const shares = ({ p50, p95 }) => `${secondsOf(p50)} (95 %: ${secondsOf(p95)})`;
  const times = [];
  if (recent.time_to_first_token) times.push(`first token after ${shares(recent.time_to_first_token)}`);
  if (recent.seconds) times.push(`the last one after ${shares(recent.seconds)}`);
  ended.times.textContent = times.join(", ");
  ended.list.replaceChildren(...recent.ended.map(endedItem));
}

function endedItem(request) {
  const item = element("li", "past");
  const cached = request.num_cached_tokens ? ` (${request.num_cached_tokens} cached)` : "";
  const notes = [`${request.num_prompt_tokens}${cached} + ${request.num_generated} tokens`];
  if (request.seconds !== null) notes.push(`first ${secondsOf(request.time_to_first_token)}`, secondsOf(request.seconds));
  item.append(element("b", "", request.finish_reasons.join(", ")), " ", element("span", "what", notes.join(" · ")));
  item.title = request.request_id;
  return item;
}

function drawQueues() {
  const byStatus = new Map(QUEUES.map(([status]) => [status, []]));
  for (const request of state.requests.values()) byStatus.get(request.status)?.push(request);
  for (const [status, parts] of queues) {
    const found = byStatus.get(status);
    parts.count.textContent = found.length;
    parts.section.hidden = found.length === 0 && status !== "running";
    parts.none.hidden = found.length > 0;
    const items = found.slice(0, ROWS_SHOWN).map(drawRow);
    if (items.length !== parts.list.children.length || items.some((item, i) => parts.list.children[i] !== item)) {
      parts.list.replaceChildren(...items);
    }
    parts.more.hidden = found.length <= ROWS_SHOWN;
    parts.more.textContent = `and ${found.length - ROWS_SHOWN} more`;
  }
  drawEnded();
  for (const id of rows.keys()) if (!state.requests.has(id)) rows.delete(id);
  const requests = [...state.requests.values()].filter((request) => request.status !== "pinned");
  const sequences = requests.reduce((sum, request) => sum + request.sequences.length, 0);
  byId("requests-summary").textContent =
    requests.length === 0 ? "" : `${plural(requests.length, "request")}, ${plural(sequences, "sequence")}`;
}

function drawRow(request) {
  const id = request.request_id;
  const item = rows.get(id) ?? makeRow(request);
  const button = item.firstChild;
  button.dataset.status = request.status;
  button.setAttribute("aria-pressed", state.pinned === id);
  button.classList.toggle("active", activeId() === id);
  const generated = request.sequences.reduce((sum, sequence) => sum + sequence.num_output_tokens, 0);
  const isPinned = request.status === "pinned";
  const notes = [isPinned ? `${request.num_prompt_tokens} tokens` : `${request.num_prompt_tokens} + ${generated} tokens`];
  if (!isPinned) notes.push(...(request.tokens_per_second > 0 ? [`${rate(request.tokens_per_second)} tokens/s`] : []), secondsOf(request.seconds));
  if (request.num_image_tokens > 0) notes.push(`${request.num_image_tokens} of images`);
  if (request.sequences.length > 1) notes.push(plural(request.sequences.length, "sequence"));
  if (request.num_preemptions > 0) notes.push(`preempted ${request.num_preemptions}×`);
  if (request.is_background) notes.push("line of a batch");
  if (request.waits_for_prefix) notes.push("waits for a prefix in the making");
  button.querySelector(".what").textContent = notes.join(" · ");
  button.querySelector("b").textContent = request.blocks.size;
  const end = item.querySelector(".end");
  if (admin.isOne && !isPinned && !request.is_background && end === null) item.append(endButton(id));
  if (!admin.isOne) end?.remove();
  return item;
}

function makeRow(request) {
  const id = request.request_id;
  const item = element("li");
  const button = element("button", "request");
  button.type = "button";
  paint(button, request.colour);
  const who = element("span", "who", `${nameOf(request)} `);
  who.append(element("small", "", longNameOf(request)));
  const blocks = element("span", "blocks");
  blocks.append(element("b"), "blocks");
  button.append(element("i", "chip"), who, element("span", "what"), blocks);
  button.title = id;
  button.addEventListener("pointerenter", () => pointAtRequest(id));
  button.addEventListener("pointerleave", () => pointAtRequest(null));
  button.addEventListener("focus", () => button.matches(":focus-visible") && pointAtRequest(id));
  button.addEventListener("blur", () => pointAtRequest(null));
  button.addEventListener("click", () => {
    state.pinned = state.pinned === id ? null : id;
    drawAll();
  });
  button.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const all = [...document.querySelectorAll(".request")];
    all[all.indexOf(button) + step]?.focus();
  });
  item.append(button);
  rows.set(id, item);
  return item;
}
