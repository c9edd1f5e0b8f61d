// What the page knows: the last frame, worked up once for all that draw it, and what the reader points at.

const byId = (id) => document.getElementById(id);
const isTouched = () => matchMedia("(pointer: coarse)").matches; // there a focus brings up the keyboard

const state = {
  frame: null,
  owners: new Map(), // physical block -> {entries: [{request, sequence, group, logical}], requests, fill}
  requests: new Map(), // id -> request, with `blocks` (a Set) and `colour`
  hovered: null, // id of the request under the pointer or the keyboard's focus
  pinned: null, // id of the request that was selected
  block: null, // physical block under the pointer
};

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

const CACHED = 255;

// Fills `state` from a body of /debug/kv.
function takeFrame(frame) {
  const kv = frame.kv;
  kv.bytes = bytesOf(kv.states);
  kv.hostBytes = bytesOf(kv.host_states);
  const owners = new Map();
  const hostOwners = new Map();
  const requests = new Map();
  for (const request of kv.requests) {
    request.colour = colourOf(request.request_id);
    request.blocks = new Set();
    requests.set(request.request_id, request);
    for (const sequence of request.sequences) {
      addOwners(owners, request, sequence, sequence.tables, request.blocks, kv.block_sizes);
      addOwners(hostOwners, request, sequence, sequence.host_tables, new Set(), kv.block_sizes);
    }
  }
  state.frame = frame;
  state.owners = owners;
  state.hostOwners = hostOwners;
  state.requests = requests;
  if (!requests.has(state.hovered)) state.hovered = null;
  if (!requests.has(state.pinned)) state.pinned = null;
}

function addOwners(owners, request, sequence, tables, blocks, blockSizes) {
  tables.forEach((table, group) => {
    const lastFill = sequence.num_stored_tokens / blockSizes[group] - (table.length - 1);
    table.forEach((block, logical) => {
      if (block === 0) return; // a sliding window has passed
      blocks.add(block);
      let known = owners.get(block);
      if (known === undefined) owners.set(block, (known = { entries: [], requests: [], fill: 0, size: blockSizes[group] }));
      known.entries.push({ request, sequence, group, logical });
      if (known.requests.at(-1) !== request) known.requests.push(request);
      known.fill = Math.max(known.fill, logical < table.length - 1 ? 1 : lastFill);
    });
  });
}

// The request that the map lights and the tables show; null: none in particular.
const activeId = () => state.hovered ?? state.pinned;

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const percent = (share) => `${share > 0 && share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;

function nameOf(request) {
  const cut = request.request_id.lastIndexOf("#");
  return cut < 0 ? request.request_id : request.request_id.slice(cut);
}

function longNameOf(request) {
  const cut = request.request_id.lastIndexOf("#");
  const name = cut < 0 ? "" : request.request_id.slice(0, cut);
  return name.length > 18 ? `${name.slice(0, 13)}…${name.slice(-4)}` : name;
}
