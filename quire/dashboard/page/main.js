// The stream of frames, what the reader points at, and everything drawn again when either changes.

const RATE = 4; // frames a second
const SERVER = "#server"; // of the address: the second tab
const LONGEST_WAIT = 10_000; // milliseconds between two attempts to connect

const link = { key: sessionStorage.getItem("quire-key"), abort: null, wait: 500, timer: 0, isPaused: false, isNew: false };

const deviceMap = new BlockMap(byId("map"), { tallest: 440 });
const hostMap = new BlockMap(byId("host-map"), { tallest: 120 });

class RefusedError extends Error {}

// fetch with the key; an answer that is no success becomes an error with the server's own words.
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (link.key !== null) headers.Authorization = `Bearer ${link.key}`;
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "TypeError" ? new Error("the server does not answer") : error;
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answers ${response.status}`;
  throw response.status === 401 ? new RefusedError(message) : new Error(message);
}

// The data of server-sent events, as they come.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "TypeError" ? new Error("the connection to the server broke") : error;
    });
    if (done) return;
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

async function connect() {
  disconnect();
  if (link.isPaused || document.visibilityState === "hidden") return;
  const abort = new AbortController();
  link.abort = abort;
  try {
    const response = await ask(`debug/kv/events?rate=${RATE}`, { signal: abort.signal });
    byId("key-form").hidden = true;
    link.isNew = true;
    for await (const data of eventsOf(response)) {
      const frame = JSON.parse(data);
      if (frame.error) throw new Error(frame.error.message);
      link.wait = 500;
      show(frame);
    }
    throw new Error("the server closed the stream");
  } catch (error) {
    if (abort.signal.aborted) return;
    if (error instanceof RefusedError) return askForKey(error.message);
    setLink("lost", `no connection: ${error.message}`);
    link.timer = setTimeout(connect, link.wait);
    link.wait = Math.min(2 * link.wait, LONGEST_WAIT);
  }
}

function disconnect() {
  clearTimeout(link.timer);
  link.abort?.abort();
  link.abort = null;
}

function askForKey(message) {
  setLink("lost", "locked");
  byId("key-form").hidden = false;
  byId("key-error").textContent = link.key === null ? "" : message;
  if (document.activeElement === document.body) byId("key").focus();
}

function setLink(name, text) {
  byId("link").dataset.state = name;
  if (byId("link").textContent !== text) byId("link").textContent = text;
}

function show(frame) {
  takeFrame(frame);
  setLink("live", frame.is_draining ? "shutting down" : "live");
  byId("model").textContent = frame.model;
  byId("backend").textContent = frame.backend;
  byId("backend").parentElement.title = `${frame.model} ${frame.backend}`;
  byId("version").textContent = `Quire ${frame.version}, context of ${frame.max_model_len.toLocaleString("en")} tokens`;
  document.title = `Quire: ${frame.model}`;
  if (byId("first-view").dataset.task !== frame.task) setTask(frame.task);
  if (history.counters.length === 0) sample();
  if (link.isNew) {
    link.isNew = false;
    loadHistory().catch(() => setAdmin(false)); // the charts then begin now
  }
  drawAll();
}

// The first tab is what the model is for; what it cannot do is not offered.
function setTask(task) {
  byId("first-view").dataset.task = task;
  byId("chat-view").hidden = task !== "chat";
  const isPooling = task !== "chat" && task !== "completion";
  byId("tab-first").textContent = { chat: "Chat", completion: "Complete", embed: "Embed" }[task] ?? "Classify";
  byId("vector-view").hidden = !isPooling;
  if (isPooling) setVectors(task);
  const box = document.querySelector(".try");
  if (task === "completion") byId("first-view").append(box);
  box.hidden = isPooling;
  showTab();
  if (task !== "chat") return;
  drawLog(); // which names the model
  drawSamples();
  if ([document.body, byId("key")].includes(document.activeElement) && !isTouched()) byId("message").focus();
}

function showTab() {
  const isServer = location.hash === SERVER;
  for (const [tab, view, isShown] of [["tab-first", "first-view", !isServer], ["tab-server", "server-view", isServer]]) {
    byId(view).hidden = !isShown;
    byId(tab).setAttribute("aria-selected", isShown);
    byId(tab).tabIndex = isShown ? 0 : -1;
  }
  byId("pause").hidden = !isServer;
  drawAll();
  drawCharts();
}

function listenToTabs() {
  const go = (isServer) => {
    window.history.replaceState(null, "", isServer ? SERVER : location.pathname + location.search);
    showTab();
  };
  byId("tab-first").addEventListener("click", () => go(false));
  byId("tab-server").addEventListener("click", () => go(true));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    go(event.key === "ArrowRight");
    document.querySelector(".tabs [aria-selected='true']").focus();
  });
  window.addEventListener("hashchange", showTab);
}

function drawAll() {
  if (state.frame === null || byId("server-view").hidden) return;
  drawMaps();
  drawQueues();
  drawTables();
}

function drawMaps() {
  const { kv } = state.frame;
  const marked = state.requests.get(activeId()) ?? null;
  deviceMap.draw(kv.bytes, state.owners, marked);
  drawCursor(deviceMap, byId("cursor"), state.block);
  byId("host").hidden = kv.hostBytes.length < 2;
  if (kv.hostBytes.length > 1) {
    hostMap.draw(kv.hostBytes, state.hostOwners, marked);
    const used = kv.hostBytes.reduce((sum, value) => sum + (value > 0 && value < CACHED), 0);
    byId("host-summary").textContent = `${used} of ${plural(kv.hostBytes.length - 1, "block")} in use`;
  }
  drawSummary(kv.bytes);
  drawAdapters(state.frame.stats);
  drawImages(state.frame.stats);
  if (state.block !== null) byId("block-text").textContent = describeBlock(state.block);
}

function drawSummary(bytes) {
  const counts = { used: 0, shared: 0, cached: 0, free: 0 };
  for (let block = 1; block < bytes.length; block++) {
    const value = bytes[block];
    if (value === 0) counts.free += 1;
    else if (value === CACHED) counts.cached += 1;
    else {
      counts.used += 1;
      counts.shared += value > 1;
    }
  }
  const summary = Object.entries(counts).map(([name, count]) => `${count.toLocaleString("en")} ${name}`);
  const sizes = [...new Set(state.frame.kv.block_sizes)].map((size) => plural(size, "token"));
  byId("memory-summary").textContent = `${summary.join(" · ")} · blocks of ${sizes.join(" or ")}`;
  Object.assign(byId("map").dataset, counts);
}

function drawAdapters(stats) {
  byId("adapters").hidden = stats.num_adapter_slots === 0;
  const parts = [`${stats.num_loaded_adapters} of ${plural(stats.num_adapter_slots, "slot")}`];
  if (stats.running_adapters.length) parts.push(`running ${stats.running_adapters.join(", ")}`);
  if (stats.waiting_adapters.length) parts.push(`waiting ${stats.waiting_adapters.join(", ")}`);
  byId("adapters-summary").textContent = parts.join(" · ");
}

function drawImages(stats) {
  byId("images").hidden = stats.max_encoder_tokens === 0;
  const [kept, most] = [stats.num_encoder_tokens, stats.max_encoder_tokens].map((each) => each.toLocaleString("en"));
  byId("images-summary").textContent = `${kept} of ${most} tokens kept · ${stats.encoded_images_total} encoded`;
}

function pointAtRequest(id) {
  state.hovered = id;
  drawAll();
}

function pointAtBlock(block) {
  if (state.frame === null || block === state.block) return;
  state.block = block;
  if (block === null) byId("block-text").textContent = "Point at a block, or move with the arrow keys.";
  drawMaps();
}

function listen() {
  const map = byId("map");
  map.addEventListener("pointermove", (event) => pointAtBlock(deviceMap.blockAt(event)));
  map.addEventListener("pointerleave", () => pointAtBlock(null));
  map.addEventListener("blur", () => pointAtBlock(null));
  map.addEventListener("click", (event) => {
    const [entry] = state.owners.get(deviceMap.blockAt(event))?.entries ?? [];
    state.pinned = entry ? entry.request.request_id : null;
    drawAll();
  });
  map.addEventListener("keydown", (event) => {
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) || state.frame === null) return;
    event.preventDefault();
    const enters = state.block === null && event.key.startsWith("Arrow");
    pointAtBlock(enters ? deviceMap.first : deviceMap.neighbour(state.block, event.key));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    state.pinned = null;
    drawAll();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    link.key = byId("key").value;
    sessionStorage.setItem("quire-key", link.key);
    drawCurl();
    connect();
  });
  byId("show-key").addEventListener("click", () => {
    byId("key-form").hidden = !byId("key-form").hidden;
    if (!byId("key-form").hidden) byId("key").focus();
  });
  byId("pause").addEventListener("click", () => {
    link.isPaused = !link.isPaused;
    byId("pause").setAttribute("aria-pressed", link.isPaused);
    byId("pause").textContent = link.isPaused ? "Resume" : "Pause";
    if (link.isPaused) setLink("paused", "paused");
    connect();
  });
  byId("theme").addEventListener("click", () => setTheme({ auto: "light", light: "dark", dark: "auto" }[theme()]));
  document.addEventListener("visibilitychange", connect);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  window.addEventListener("resize", () => {
    drawAll();
    drawCharts();
  });
}

const theme = () => document.documentElement.dataset.theme ?? "auto";

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("quire-theme", name);
  byId("theme").textContent = `Theme: ${name}`;
  recolour();
}

function recolour() {
  deviceMap.forget();
  hostMap.forget();
  drawAll();
  drawCharts();
}

buildQueues();
buildCharts();
buildPrompt();
buildVectors();
buildAdmin();
buildChat();
listen();
listenToTabs();
showTab();
setTheme(localStorage.getItem("quire-theme") ?? "auto");
setInterval(() => {
  if (byId("link").dataset.state === "live") sample();
}, 1000);
connect();
