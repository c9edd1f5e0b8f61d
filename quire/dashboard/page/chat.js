// The chat: conversations with this very server, streamed, with what each answer took.

const answering = { abort: null, isDue: false };
const FIELDS = { system: "chat-system", stop: "chat-stop", more: "chat-more", temperature: "chat-temperature", top_p: "chat-top-p", max_tokens: "chat-max-tokens", seed: "chat-seed" };
const PANELS = [["show-chats", "chats"], ["show-drawer", "drawer"]];
const FAR = 120; // pixels from the end at which the way back to it is offered

const scrolled = { follows: true, top: 0 }; // whether the end of the conversation is kept in sight

function buildChat() {
  loadChats();
  buildComposer();
  byId("new-chat").addEventListener("click", () => openChat(newChat()));
  byId("halt").addEventListener("click", () => answering.abort?.abort());
  document.addEventListener("keydown", leave);
  for (const [button, panel] of PANELS) {
    byId(button).addEventListener("click", () => setOpen(button, panel, !byId(panel).classList.contains("open")));
  }
  for (const [name, id] of Object.entries(FIELDS)) byId(id).addEventListener("input", () => takeSetting(name, byId(id)));
  byId("export").addEventListener("click", () => saveFile("quire-chats.json", JSON.stringify(chats.all.filter((chat) => chat.messages.length > 0), null, 1)));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("copy-curl").addEventListener("click", () => copyText(byId("chat-curl").textContent, byId("copy-curl")));
  byId("copy-python").addEventListener("click", () => copyText(byId("chat-python").textContent, byId("copy-python")));
  byId("log").addEventListener("scroll", noteScroll);
  byId("to-end").addEventListener("click", () => {
    scrollToEnd();
    byId("message").focus();
  });
  window.addEventListener("storage", takeOthers);
  window.addEventListener("pagehide", () => {
    if (answering.abort !== null) keepChats(); // else all is kept already
    keepDraft();
  });
  restoreDraft();
}

// Escape closes what is open above the conversation, else it stops the answer.
function leave(event) {
  if (event.key !== "Escape" || byId("chat-view").hidden || byId("first-view").hidden) return;
  const opened = PANELS.filter(([, panel]) => byId(panel).classList.contains("open"));
  if (opened.length === 0) return answering.abort?.abort();
  for (const [button, panel] of opened) {
    setOpen(button, panel, false);
    byId(button).focus();
  }
}

function setOpen(button, panel, isOpen) {
  byId(panel).classList.toggle("open", isOpen);
  byId(button).setAttribute("aria-expanded", isOpen);
}

function takeSetting(name, field) {
  const { settings } = chats.open;
  if (field.value === "") delete settings[name];
  else if (!NUMBERS.includes(name)) settings[name] = field.value;
  else if (Number.isFinite(field.valueAsNumber)) settings[name] = field.valueAsNumber;
  drawSamples();
  keep();
}

function keep() {
  if (!keepChats()) sayChat("the browser has no room for more conversations: export them, and delete some", true);
}

// What another tab has changed. The conversation that is open here stays as it is while its answer comes.
function takeOthers({ key }) {
  if (key !== CHATS) return;
  const { open } = chats;
  loadChats();
  const at = chats.all.findIndex((chat) => chat.id === open.id);
  const isSame = at >= 0 && JSON.stringify(chats.all[at]) === JSON.stringify(open);
  if (at < 0 || isSame || answering.abort !== null) {
    if (at >= 0) chats.all[at] = open;
    else if (answering.abort !== null) chats.all.unshift(open);
    drawList();
  } else {
    chats.open = chats.all[at];
    drawList();
    drawLog(true);
  }
}

async function importFile() {
  try {
    const count = await readFile(byId("import-file").files[0]);
    openChat(chats.all[0]);
    keep();
    sayChat(`${plural(count, "conversation")} imported`);
  } catch (error) {
    sayChat(`not imported: ${error.message}`, true);
  }
  byId("import-file").value = "";
}

function openChat(chat) {
  answering.abort?.abort();
  chats.open = chat;
  for (const [name, id] of Object.entries(FIELDS)) byId(id).value = chat.settings[name] ?? "";
  setOpen("show-chats", "chats", false);
  sayChat("");
  byId("undo").hidden = true;
  drawList();
  drawLog();
  drawSamples();
  chooseRole();
  if (!isTouched() && !byId("chat-view").hidden) byId("message").focus();
}

function promote(chat) {
  chats.all = [chat, ...chats.all.filter((other) => other !== chat)];
}

function drawList() {
  const items = chats.all.filter((chat) => chat.messages.length > 0).map((chat) => {
    const item = element("li");
    const open = actionButton(titleOf(chat), () => openChat(chat), "chat-name");
    open.title = titleOf(chat);
    if (chat === chats.open) open.setAttribute("aria-current", "true");
    const drop = actionButton("×", () => deleteChat(chat));
    drop.setAttribute("aria-label", `Delete ${titleOf(chat)}`);
    item.append(open, drop);
    return item;
  });
  fillWith(byId("chat-list"), items);
  byId("no-chats").hidden = items.length > 0;
}

function deleteChat(chat) {
  const at = chats.all.indexOf(chat);
  const isOpen = chat === chats.open;
  chats.all.splice(at, 1);
  if (isOpen) openChat(chats.all[at] ?? chats.all[0] ?? newChat());
  else drawList();
  keep();
  offerUndo("conversation deleted", chat, [...chat.messages], at);
  byId("undo").querySelector("button").focus();
}

// A way back to the messages as they were.
function offerUndo(text, chat, before = [...chat.messages], at = 0) {
  const undo = actionButton("Undo", () => {
    answering.abort?.abort();
    chat.messages = before;
    if (!chats.all.includes(chat)) chats.all.splice(at, 0, chat);
    openChat(chat);
    keep();
    byId("message").focus();
  }, "");
  byId("undo").replaceChildren(element("span", "", text), undo);
  byId("undo").hidden = false;
}

// Returns the views. keepsPlace: what is in sight stays there.
function drawLog(keepsPlace = false) {
  const { messages } = chats.open;
  const log = byId("log");
  const { scrollTop } = log;
  const views = messages.map(messageView);
  fillWith(log, views.map(({ root }) => root));
  byId("welcome").hidden = messages.length > 0;
  if (keepsPlace) log.scrollTop = scrollTop;
  else scrollToEnd();
  drawComposer();
  return views;
}

function fillWith(target, nodes) {
  target.replaceChildren();
  for (const node of nodes) target.append(node);
}

const leftBelow = () => byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight;

// A reader who scrolls up reads on there; back at the end, new text is kept in sight again.
function noteScroll() {
  const top = byId("log").scrollTop;
  if (leftBelow() < 3) scrolled.follows = true;
  else if (top < scrolled.top) scrolled.follows = false;
  scrolled.top = top;
  byId("to-end").hidden = leftBelow() < FAR;
}

function scrollToEnd() {
  scrolled.follows = true;
  byId("log").scrollTop = byId("log").scrollHeight;
  noteScroll();
}

// Whether the settings make a request; else the page says why not.
function canAsk() {
  try {
    moreOf(chats.open.settings);
    return true;
  } catch (error) {
    sayChat(`not sent: the field “More settings” holds no JSON: ${error.message}`, true);
    return false;
  }
}

// Asks for the answer that stands at `index`; what is there and behind it goes. continued: the answer there, which goes on.
async function answerFrom(index, continued = null, before = [...chats.open.messages]) {
  if (answering.abort !== null || !canAsk()) return;
  if (continued?.content === "") return answerFrom(index, null, before); // there is nothing to go on with
  const chat = chats.open;
  const message = continued ? { ...continued, error: "", note: "" } : newMessage("assistant", "");
  chat.messages = [...chat.messages.slice(0, index), ...(continued ? [message] : [])];
  if (before.length > index) offerUndo(continued ? "the answer goes on" : "answered again", chat, before);
  promote(chat);
  const body = chatBody(chat, continued !== null);
  if (!continued) chat.messages.push(message);
  drawList();
  const view = drawLog().at(-1);
  view.root.classList.add("busy");
  const abort = new AbortController();
  answering.abort = abort;
  setBusy(true);
  sayChat("waiting for the first token");
  byId("said").textContent = "";
  keep();
  try {
    await readAnswer(body, message, view, abort.signal);
  } catch (error) {
    if (abort.signal.aborted) message.note = `${message.note} · stopped`.replace(/^ · /, "");
    else message.error = error.message;
  }
  answering.abort = null;
  view.root.classList.remove("busy");
  if (message.content === "" && message.reasoning === "" && message.calls.length === 0 && !message.error) message.note ||= "empty answer";
  view.draw();
  setBusy(false);
  keep();
  if (chat !== chats.open) return;
  if (scrolled.follows) scrollToEnd();
  sayChat("");
  byId("said").textContent = message.error || splitThoughts(message).content;
  drawSamples();
  chooseRole();
}

async function readAnswer(body, message, view, signal) {
  const started = performance.now();
  let first = 0;
  let count = 0;
  let end = "";
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const [choice] = chunk.choices;
    if (choice !== undefined && takeDelta(message, choice.delta)) {
      first ||= performance.now();
      count += 1;
      sayChat("");
    }
    count = chunk.usage?.completion_tokens ?? count;
    end = choice?.finish_reason ?? end;
    message.note = tookOf(count, first - started, performance.now() - first, end === "length");
    schedule(view);
  }
  if (end === "") throw new Error("the answer broke off: the server closed the connection");
}

// Adds what is new; false: nothing is.
function takeDelta(message, { content, reasoning, tool_calls: calls }) {
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const { index, id, function: called } of calls ?? []) {
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls?.length);
}

function tookOf(count, wait, time, isCut) {
  if (count === 0 || wait < 0) return "";
  const rate = count > 1 && time > 0 ? ` · ${((1000 * (count - 1)) / time).toFixed(1)} tokens/s` : "";
  return `${plural(count, "token")}${rate} · first after ${(wait / 1000).toFixed(2)} s${isCut ? " · cut at the limit" : ""}`;
}

// Draws once a frame, and keeps the end in sight where it was.
function schedule(view) {
  if (answering.isDue) return;
  answering.isDue = true;
  requestAnimationFrame(() => {
    answering.isDue = false;
    view.draw();
    if (scrolled.follows) scrollToEnd();
    else noteScroll();
  });
}

// The focus goes from the button that vanishes to the one that comes, and then to the next message.
function setBusy(isBusy) {
  const hadFocus = [byId("send"), byId("halt"), document.body].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("halt").hidden = !isBusy;
  byId("log").setAttribute("aria-busy", isBusy);
  if (!hadFocus || byId("first-view").hidden) return;
  if (isBusy) byId("halt").focus();
  else if (!isTouched()) byId("message").focus();
}

function sayChat(text, isBad = false) {
  byId("chat-status").textContent = text;
  byId("chat-status").classList.toggle("bad", isBad);
}

function drawSamples() {
  let body;
  try {
    body = chatBody(chats.open);
  } catch (error) {
    byId("more-error").textContent = `no JSON: ${error.message}`;
    return;
  }
  byId("more-error").textContent = "";
  if (body.messages.length === 0) body.messages.push({ role: "user", content: "Hello" });
  byId("chat-curl").textContent = asCurl("v1/chat/completions", body);
  byId("chat-python").textContent = asPython(body);
}
