// The message that is being written: its role, its text and its pictures, which survive a reload of the page.

const DRAFT = "quire-draft"; // the entry of the tab's storage
const attached = []; // data URLs of the pictures

function buildComposer() {
  const field = byId("message");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendMessage();
  });
  field.addEventListener("keydown", (event) => {
    // A telephone's keyboard has no Shift+Enter: there Enter begins a line.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched()) return;
    event.preventDefault();
    sendMessage();
  });
  field.addEventListener("input", drawComposer);
  byId("role").addEventListener("change", drawComposer);
  field.addEventListener("paste", (event) => attach(event.clipboardData.files, event));
  byId("composer").addEventListener("dragover", (event) => event.preventDefault());
  byId("composer").addEventListener("drop", (event) => attach(event.dataTransfer.files, event));
  byId("picture").addEventListener("click", () => byId("picture-file").click());
  byId("picture-file").addEventListener("change", (event) => {
    attach(event.target.files, event);
    event.target.value = "";
  });
}

// What Send does depends on the role, and on whether there is a text.
function drawComposer() {
  const field = byId("message");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 240)}px`;
  const { messages } = chats.open;
  const isEmpty = field.value.trim() === "" && attached.length === 0;
  const waits = messages.length > 0 && messages.at(-1).role !== "assistant";
  const asks = ["user", "tool"].includes(byId("role").value);
  byId("send").textContent = isEmpty && waits ? "Answer" : asks ? "Send" : "Add";
  const call = byId("role").value === "tool" ? openCalls(messages)[0] : undefined;
  const takesPictures = (state.frame?.stats.max_encoder_tokens ?? 0) > 0;
  byId("picture").hidden = !takesPictures;
  field.placeholder = call ? `The result of ${call.name}` : `Write a message${takesPictures ? "; paste or drop pictures" : ""}`;
}

// The role of the next message: what was called wants its result.
function chooseRole() {
  byId("role").value = openCalls(chats.open.messages).length > 0 ? "tool" : "user";
  drawComposer();
}

// A user's message and the last result of a tool ask for an answer; others are added. Nothing written: answers what is there.
function sendMessage() {
  const field = byId("message");
  if (answering.abort !== null || !canAsk()) return;
  const { messages } = chats.open;
  const role = byId("role").value;
  const isEmpty = field.value.trim() === "" && attached.length === 0;
  if (isEmpty && (messages.length === 0 || messages.at(-1).role === "assistant")) return;
  if (!isEmpty) {
    const callId = role === "tool" ? (openCalls(messages)[0]?.id ?? "") : "";
    messages.push(newMessage(role, field.value, { images: attached.splice(0), callId }));
    field.value = "";
    drawAttached();
  }
  byId("undo").hidden = true;
  const asks = isEmpty || role === "user" || (role === "tool" && openCalls(messages).length === 0);
  if (asks) answerFrom(messages.length);
  else {
    promote(chats.open);
    keep();
    drawList();
    drawLog();
    drawSamples();
    sayChat(role === "tool" ? "" : "added; Answer asks for what comes next");
  }
  chooseRole();
  if (!isTouched()) field.focus();
}

// Takes the pictures among some files into the message.
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
    const button = actionButton("", () => {
      attached.splice(index, 1);
      drawAttached();
      byId("message").focus();
    });
    button.setAttribute("aria-label", "Remove this picture");
    button.append(pictureView(url));
    return button;
  });
  byId("attached").replaceChildren(...views);
  drawComposer();
}

// Which conversation was open, the settings of one without messages, and what was being written.
function keepDraft() {
  const { id, messages, settings } = chats.open;
  const draft = { id, settings: messages.length === 0 ? settings : {}, text: byId("message").value, role: byId("role").value };
  sessionStorage.setItem(DRAFT, JSON.stringify(draft));
}

function restoreDraft() {
  let draft = {};
  try {
    draft = JSON.parse(sessionStorage.getItem(DRAFT)) ?? {};
  } catch {
    // a draft of nothing
  }
  const known = chats.all.find((chat) => chat.id === draft.id);
  const chat = known ?? (draft.id === undefined ? chats.all[0] : undefined) ?? newChat();
  if (chat.messages.length === 0) chat.settings = readChat({ messages: [], settings: draft.settings }).settings;
  openChat(chat);
  byId("message").value = textOr(draft.text);
  if (ROLES.includes(draft.role)) byId("role").value = draft.role;
  drawComposer();
}
