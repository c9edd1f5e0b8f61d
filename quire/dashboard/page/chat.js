// The chat: a conversation with this very server, streamed, with what each answer took.

const answering = { abort: null, view: null, isDue: false };
const attached = []; // data URLs of the pictures of the message that is being written
const FIELDS = { system: "chat-system", stop: "chat-stop", temperature: "chat-temperature", top_p: "chat-top-p", max_tokens: "chat-max-tokens", seed: "chat-seed" };

function buildChat() {
  loadChats();
  byId("new-chat").addEventListener("click", () => openChat(newChat()));
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendMessage();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      sendMessage();
    }
  });
  byId("message").addEventListener("input", growMessage);
  byId("message").addEventListener("paste", (event) => attach(event.clipboardData.files, event));
  byId("composer").addEventListener("dragover", (event) => event.preventDefault());
  byId("composer").addEventListener("drop", (event) => attach(event.dataTransfer.files, event));
  byId("halt").addEventListener("click", () => answering.abort?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("chat-view").hidden) answering.abort?.abort();
  });
  for (const [button, panel] of [["show-chats", "chats"], ["show-drawer", "drawer"]]) {
    byId(button).addEventListener("click", () => setOpen(button, panel, !byId(panel).classList.contains("open")));
  }
  for (const [name, id] of Object.entries(FIELDS)) byId(id).addEventListener("input", () => takeSetting(name, byId(id)));
  byId("export").addEventListener("click", () => saveFile("quire-chats.json", JSON.stringify(chats.all.filter((chat) => chat.messages.length > 0), null, 1)));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("copy-curl").addEventListener("click", () => copyText(byId("chat-curl").textContent, byId("copy-curl")));
  byId("copy-python").addEventListener("click", () => copyText(byId("chat-python").textContent, byId("copy-python")));
  openChat(chats.all[0] ?? newChat());
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
  drawList();
  drawLog();
  drawSamples();
  if (matchMedia("(hover: hover)").matches && !byId("chat-view").hidden) byId("message").focus();
}

function drawList() {
  const items = chats.all.filter((chat) => chat.messages.length > 0).map((chat) => {
    const item = element("li");
    const open = element("button", "chat-name", titleOf(chat));
    open.type = "button";
    if (chat === chats.open) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openChat(chat));
    const drop = element("button", "quiet", "×");
    drop.type = "button";
    drop.setAttribute("aria-label", `Delete ${titleOf(chat)}`);
    drop.addEventListener("click", () => {
      chats.all = chats.all.filter((other) => other !== chat);
      keep();
      if (chat === chats.open) openChat(chats.all[0] ?? newChat());
      else drawList();
    });
    item.append(open, drop);
    return item;
  });
  byId("chat-list").replaceChildren(...items);
  byId("no-chats").hidden = items.length > 0;
}

function drawLog() {
  byId("log").replaceChildren(...chats.open.messages.map((message, index) => messageView(message, index).root));
  byId("welcome").hidden = chats.open.messages.length > 0;
  byId("log").scrollTop = byId("log").scrollHeight;
}

// What a message looks like. `draw` brings it up to what the message says by now.
function messageView(message, index) {
  const root = element("article", `message ${message.role}`);
  const thoughts = element("details", "thoughts");
  const thoughtText = element("div", "prose");
  thoughts.append(element("summary", "", "Thoughts"), thoughtText);
  const prose = element("div", message.role === "assistant" ? "prose" : "said");
  const shown = element("div", "pictures");
  shown.append(...(message.images ?? []).map(pictureView));
  const calls = element("div", "calls");
  const error = element("p", "bad");
  error.setAttribute("role", "alert");
  const foot = element("footer");
  const note = element("span", "note");
  foot.append(...actionsOf(message, index, root), note);
  root.append(element("h3", "", { user: "You", assistant: state.frame?.model ?? "Model" }[message.role] ?? message.role), thoughts, shown, prose, calls, error, foot);
  const draw = () => {
    const { reasoning, content } = splitThoughts(message);
    thoughts.hidden = reasoning === "";
    if (reasoning) drawMarkdown(thoughtText, reasoning);
    if (message.role === "assistant") drawMarkdown(prose, content);
    else prose.textContent = content;
    calls.replaceChildren(...message.calls.map((call) => codeBlock(indented(call.arguments), `call of ${call.name}`)));
    error.textContent = message.error;
    note.textContent = message.note;
  };
  draw();
  return { root, thoughts, draw };
}

// Thoughts that the server has left in the text, between the usual marks, are folded as well.
function splitThoughts({ reasoning, content }) {
  const start = content.trimStart();
  if (reasoning || !start.startsWith("<think>")) return { reasoning, content };
  const end = start.indexOf("</think>");
  if (end < 0) return { reasoning: start.slice(7), content: "" };
  return { reasoning: start.slice(7, end).trim(), content: start.slice(end + 8).trimStart() };
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function actionsOf(message, index, root) {
  const action = (label, work) => {
    const button = element("button", "quiet", label);
    button.type = "button";
    button.addEventListener("click", () => work(button));
    return button;
  };
  const copy = action("Copy", (button) => copyText(splitThoughts(message).content, button));
  if (message.role !== "assistant") return [copy, action("Edit", () => editMessage(message, index, root))];
  return [copy, action("Regenerate", () => answerFrom(index))];
}

// The text as a field; what came behind it is asked for again.
function editMessage(message, index, root) {
  const form = element("form", "edit");
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Message");
  const send = element("button", "primary", "Send");
  const cancel = element("button", "", "Cancel");
  cancel.type = "button";
  cancel.addEventListener("click", drawLog);
  form.append(field, send, cancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    message.content = field.value;
    answerFrom(index + 1);
  });
  root.replaceChildren(form);
  field.focus();
}

// Takes the pictures among some files into the message that is being written.
async function attach(files, event) {
  const pictures = [...files].filter((file) => file.type.startsWith("image/"));
  if (pictures.length === 0) return;
  event.preventDefault();
  for (const file of pictures) attached.push(await dataUrlOf(file));
  drawAttached();
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function pictureView(url) {
  const image = element("img", "picture");
  image.src = url;
  image.alt = "Picture";
  return image;
}

// A click takes a picture out again.
function drawAttached() {
  const views = attached.map((url, index) => {
    const button = element("button", "quiet");
    button.type = "button";
    button.setAttribute("aria-label", "Remove this picture");
    button.append(pictureView(url));
    button.addEventListener("click", () => {
      attached.splice(index, 1);
      drawAttached();
    });
    return button;
  });
  byId("attached").replaceChildren(...views);
}

function growMessage() {
  const field = byId("message");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 240)}px`;
}

function sendMessage() {
  const field = byId("message");
  if ((field.value.trim() === "" && attached.length === 0) || answering.abort !== null) return;
  chats.open.messages.push({ role: "user", content: field.value, images: attached.splice(0), reasoning: "", calls: [], note: "", error: "" });
  field.value = "";
  drawAttached();
  growMessage();
  answerFrom(chats.open.messages.length);
}

// Asks for the answer that stands at `index`; what is there and behind it goes.
async function answerFrom(index) {
  if (answering.abort !== null) return;
  const chat = chats.open;
  chat.messages.length = index;
  chats.all = [chat, ...chats.all.filter((other) => other !== chat)];
  const body = chatBody(chat);
  const message = { role: "assistant", content: "", reasoning: "", calls: [], note: "", error: "" };
  chat.messages.push(message);
  drawList();
  drawLog();
  const view = messageView(message, index);
  byId("log").lastChild.replaceWith(view.root);
  view.root.classList.add("busy");
  const abort = new AbortController();
  answering.abort = abort;
  setBusy(true);
  sayChat("waiting for the first token");
  try {
    await readAnswer(body, message, view, abort.signal);
  } catch (error) {
    if (abort.signal.aborted) message.note = `${message.note} · stopped`.replace(/^ · /, "");
    else message.error = error.message;
  }
  answering.abort = null;
  setBusy(false);
  view.root.classList.remove("busy");
  view.thoughts.open = false;
  view.draw();
  if (message.content === "" && message.reasoning === "" && message.calls.length === 0 && !message.error) message.note ||= "empty answer";
  keep();
  if (chat !== chats.open) return;
  sayChat("");
  byId("said").textContent = message.error || splitThoughts(message).content;
  drawSamples();
}

async function readAnswer(body, message, view, signal) {
  const started = performance.now();
  let first = 0;
  let count = 0;
  let isCut = false;
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
    }
    count = chunk.usage?.completion_tokens ?? count;
    isCut ||= choice?.finish_reason === "length";
    message.note = tookOf(count, first - started, performance.now() - first, isCut);
    sayChat("");
    schedule(view);
  }
}

// Adds what is new; false: nothing is.
function takeDelta(message, { content, reasoning, tool_calls: calls }) {
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const { index, function: called } of calls ?? []) {
    const call = (message.calls[index] ??= { name: "", arguments: "" });
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
    const log = byId("log");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    view.draw();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("halt").hidden = !isBusy;
}

function sayChat(text, isBad = false) {
  byId("chat-status").textContent = text;
  byId("chat-status").classList.toggle("bad", isBad);
}

function drawSamples() {
  const body = chatBody(chats.open);
  if (body.messages.length === 0) body.messages.push({ role: "user", content: "Hello" });
  byId("chat-curl").textContent = asCurl(body);
  byId("chat-python").textContent = asPython(body);
}
