// One message: what it looks like, and what a reader can do with it.

const NAMES = { user: "You", system: "System", tool: "Tool" };

// `draw` brings the view up to what the message says by now.
function messageView(message, index) {
  const root = element("article", `message ${message.role}`);
  const thoughts = element("details", "thoughts");
  const thoughtText = element("div", "prose");
  const summary = element("summary", "", "Thoughts");
  thoughts.append(summary, thoughtText);
  const prose = element("div", message.role === "assistant" ? "prose" : "said");
  const shown = element("div", "pictures");
  shown.append(...message.images.map(pictureView));
  const calls = element("div", "calls");
  const error = element("p", "bad");
  const foot = element("footer");
  const note = element("span", "note");
  foot.append(...actionsOf(message, index, root), note);
  root.append(element("h3", "", nameOfMessage(message, index)), thoughts, shown, prose, calls, error, foot);
  const draw = () => {
    const { reasoning, content } = splitThoughts(message);
    thoughts.hidden = reasoning === "";
    summary.textContent = root.classList.contains("busy") && content === "" ? "Thinking …" : "Thoughts";
    if (reasoning) drawMarkdown(thoughtText, reasoning);
    if (message.role === "assistant") drawMarkdown(prose, content);
    else if (prose.textContent !== content) prose.textContent = content;
    drawCalls(calls, message.calls);
    error.textContent = message.error;
    note.textContent = message.note;
  };
  draw();
  return { root, draw };
}

function nameOfMessage({ role, callId }, index) {
  if (role !== "tool") return NAMES[role] ?? state.frame?.model ?? "Model";
  const calls = chats.open.messages.slice(0, index).flatMap((message) => message.calls);
  const name = calls.find((call) => call.id === callId)?.name;
  return name ? `Result of ${name}` : NAMES.tool;
}

// Draws those calls that have changed.
function drawCalls(target, calls) {
  calls.forEach((call, number) => {
    const text = indented(call.arguments);
    const signature = `${call.name}\n${text}`;
    const known = target.children[number];
    if (known?.drawn === signature) return;
    const block = Object.assign(codeBlock(text, `call of ${call.name}`), { drawn: signature });
    if (known) known.replaceWith(block);
    else target.append(block);
  });
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

function actionButton(label, work, className = "quiet") {
  const button = element("button", className, label);
  button.type = "button";
  button.addEventListener("click", () => work(button));
  return button;
}

// While an answer comes, only what leaves the conversation as it is can be done (`redo` is hidden).
function actionsOf(message, index, root) {
  const actions = [
    actionButton("Copy", (button) => copyText(splitThoughts(message).content, button)),
    actionButton("Edit", () => editMessage(message, index, root), "quiet redo"),
  ];
  if (message.role !== "assistant") return actions;
  actions.push(actionButton("Regenerate", () => answerFrom(index), "quiet redo"));
  const isLast = index === chats.open.messages.length - 1;
  if (isLast && message.calls.length === 0) actions.push(actionButton("Continue", () => answerFrom(index, chats.open.messages[index]), "quiet redo"));
  return actions;
}

// Role and text as fields. Going on asks for what comes behind the message again; saving leaves that as it is.
function editMessage(message, index, root) {
  const form = element("form", "edit");
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(16, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Text");
  const role = byId("role").cloneNode(true);
  role.removeAttribute("id");
  role.value = message.role;
  const close = () => {
    drawLog(true);
    byId("log").children[index]?.querySelector(".redo")?.focus();
  };
  const save = () => {
    const changed = { ...message, content: field.value, role: role.value };
    if (changed.role === "tool") changed.callId ||= openCalls(chats.open.messages.slice(0, index))[0]?.id ?? "";
    if (changed.role !== "assistant") Object.assign(changed, { calls: [], reasoning: "", note: "" });
    chats.open.messages[index] = { ...changed, error: "" };
  };
  const drop = actionButton("Delete", () => {
    offerUndo("message deleted", chats.open);
    chats.open.messages.splice(index, 1);
    keep();
    drawList();
    drawLog(true);
    byId("message").focus();
  });
  const only = actionButton("Save", () => {
    save();
    keep();
    drawList();
    close();
    drawSamples();
  }, "");
  const goOn = element("button", "primary", "Send");
  const label = () => {
    goOn.textContent = role.value === "assistant" ? "Continue" : "Send";
  };
  role.addEventListener("change", label);
  label();
  form.append(field, role, drop, actionButton("Cancel", close, ""), only, goOn);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (answering.abort !== null || !canAsk()) return;
    const before = [...chats.open.messages];
    save();
    if (role.value === "assistant") answerFrom(index, chats.open.messages[index], before);
    else answerFrom(index + 1, null, before);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  root.replaceChildren(form);
  field.focus();
}
