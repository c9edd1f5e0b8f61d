// What an admin's key adds: the end of a request, and the server's log.

const LINES_KEPT = 500;
const LOG_SECONDS = 2; // between two looks at the log

const admin = { isOne: false, process: "", last: 0 };

function setAdmin(isAdmin) {
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
    const { process, lines } = await (await ask(`debug/log?after=${admin.last}`)).json();
    byId("log-status").textContent = "";
    if (process !== admin.process) { // its numbers begin at 1: the server has started again, or another process answers
      const isFirst = admin.last === 0;
      Object.assign(admin, { process, last: 0 });
      byId("log-lines").replaceChildren();
      if (!isFirst) return readLog();
    }
    addLines(lines.filter(({ number }) => number > admin.last));
  } catch (error) {
    byId("log-status").textContent = error.message;
  }
}

function addLines(lines) {
  if (lines.length === 0) return;
  const list = byId("log-lines");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  admin.last = lines.at(-1).number;
  list.append(...lines.map(lineView));
  while (list.children.length > LINES_KEPT) list.firstChild.remove();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function lineView({ time, level, logger, message, request_id: request }) {
  const line = element("p", `line ${level.toLowerCase()}`);
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
