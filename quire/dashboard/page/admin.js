// What an admin's key adds: the end of a request, and the server's log.

const LINES_KEPT = 500;
const LOG_SECONDS = 2; // between two looks at the log

const admin = { isOne: false, process: "", last: new Map() }; // last: API process -> number of its latest line here

function setAdmin(isAdmin) {
  if (!isAdmin) {
    admin.last.clear();
    byId("log-lines").replaceChildren();
  }
  admin.isOne = isAdmin;
  byId("log-card").hidden = !isAdmin;
  drawAll();
  readLog();
}

function buildAdmin() {
  byId("log-card").addEventListener("toggle", readLog);
  setInterval(readLog, 1000 * LOG_SECONDS);
}

async function readLog() {
  const isSeen = byId("log-card").open && !byId("server-view").hidden && document.visibilityState === "visible";
  if (!admin.isOne || !isSeen || link.isPaused) return;
  try {
    const after = admin.last.get(admin.process) ?? 0;
    const { lines, process } = await (await ask(`debug/log?after=${after}&process=${admin.process}`)).json();
    byId("log-status").textContent = "";
    admin.process = process;
    addLines(lines, process);
  } catch (error) {
    byId("log-status").textContent = error.message;
  }
}

// Each API process numbers its own lines; those of several stand in the order of their times.
function addLines(lines, process) {
  const last = admin.last.get(process) ?? 0;
  const fresh = lines.filter(({ number }) => number > last);
  if (fresh.length === 0) return;
  const list = byId("log-lines");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  admin.last.set(process, fresh.at(-1).number);
  for (const line of fresh) {
    const view = lineView(line);
    let before = list.lastChild;
    while (before !== null && Number(before.dataset.time) > line.time) before = before.previousSibling;
    if (before === null) list.prepend(view);
    else before.after(view);
  }
  while (list.children.length > LINES_KEPT) list.firstChild.remove();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function lineView({ time, level, logger, message, request_id: request }) {
  const line = element("p", `line ${level.toLowerCase()}`);
  line.dataset.time = time;
  line.append(element("time", "", new Date(1000 * time).toLocaleTimeString("en", { hour12: false })), " ", element("b", "", level), " ");
  line.append(element("span", "from", request === null ? logger : `${logger} ${request}`), " ", element("span", "", message));
  return line;
}

// A button that ends a request; null without an admin's key.
function endButton(id) {
  const button = element("button", "quiet end", "End");
  button.type = "button";
  button.setAttribute("aria-label", `End ${id}`);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await ask("debug/abort", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ request_id: id }) });
      byId("queues-status").textContent = "";
    } catch (error) {
      byId("queues-status").textContent = error.message;
      button.disabled = false;
    }
  });
  return button;
}
