// Conversations as the browser keeps them, and the ways out of it: files, curl and Python.

const CHATS = "quire-chats"; // the entry of the browser's storage
const MOST_CHATS = 200;
const LONGEST_TITLE = 60;
const ROLES = ["user", "assistant", "system"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

const chats = { all: [], open: null };

function newChat() {
  const settings = chats.open?.settings ?? {};
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, messages: [], settings: { ...settings } };
}

const titleOf = (chat) => {
  const first = chat.messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return first.length > LONGEST_TITLE ? `${first.slice(0, LONGEST_TITLE - 1)}…` : first || "New chat";
};

// A conversation out of a file or of the storage, which may hold anything; null: it is none.
function readChat(found) {
  if (!Array.isArray(found?.messages)) return null;
  const text = (value) => (typeof value === "string" ? value : "");
  const messages = found.messages
    .filter((message) => ROLES.includes(message?.role) && typeof message.content === "string")
    .map(({ role, content, images, reasoning, calls, note, error }) => ({
      role,
      content,
      images: Array.isArray(images) ? images.filter((url) => typeof url === "string" && url.startsWith("data:image/")) : [],
      reasoning: text(reasoning),
      calls: Array.isArray(calls) ? calls.map((call) => ({ name: text(call?.name), arguments: text(call?.arguments) })) : [],
      note: text(note),
      error: text(error),
    }));
  const settings = { system: text(found.settings?.system), stop: text(found.settings?.stop) };
  for (const name of NUMBERS) {
    if (typeof found.settings?.[name] === "number") settings[name] = found.settings[name];
  }
  return { ...newChat(), messages, settings };
}

function loadChats() {
  try {
    const found = JSON.parse(localStorage.getItem(CHATS) ?? "[]");
    chats.all = Array.isArray(found) ? found.map(readChat).filter((chat) => chat !== null) : [];
  } catch {
    chats.all = [];
  }
}

// False where the browser has no more room, or keeps nothing.
function keepChats() {
  try {
    localStorage.setItem(CHATS, JSON.stringify(chats.all.filter((chat) => chat.messages.length > 0).slice(0, MOST_CHATS)));
    return true;
  } catch {
    return false;
  }
}

// The content of a message as a request has it: pictures before the text, as parts.
function contentOf(text, images) {
  if (!images?.length) return text;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

// The body of the request that answers a conversation.
function chatBody(chat) {
  const { system, stop, ...numbers } = chat.settings;
  const messages = chat.messages.filter((message) => !message.error).map(({ role, content, images }) => ({ role, content: contentOf(content, images) }));
  const stops = (stop ?? "").split("\n").filter((line) => line !== "");
  return {
    model: state.frame?.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...numbers,
    ...(stops.length > 0 ? { stop: stops } : {}),
  };
}

// A value whose pictures are cut, to be read.
function shortened(value) {
  return JSON.parse(JSON.stringify(value, (_, each) => (typeof each === "string" && each.startsWith("data:image/") ? `${each.slice(0, 40)}…` : each)));
}

function asCurl(body) {
  const quoted = JSON.stringify(shortened(body), null, 2).replaceAll("'", "'\\''");
  const url = new URL("v1/chat/completions", location.href).href;
  return `curl ${url} \\\n  -H "Authorization: Bearer $QUIRE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

function asPython({ model, messages, ...options }) {
  const url = new URL("v1", location.href).href;
  const given = Object.entries(options).map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`);
  return `import os
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(url)}, api_key=os.environ.get("QUIRE_API_KEY", "none"))
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${JSON.stringify(shortened(messages), null, 4).replaceAll("\n", "\n    ")},
${given.join("")})
print(answer.choices[0].message.content)`;
}

function saveFile(name, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function readFile(file) {
  const found = JSON.parse(await file.text());
  const read = (Array.isArray(found) ? found : [found]).map(readChat).filter((chat) => chat !== null);
  if (read.length === 0) throw new Error("the file holds no conversation");
  chats.all = [...read, ...chats.all];
  return read.length;
}

// Copies a text, also over plain HTTP, where pages have no clipboard.
async function copyText(text, button) {
  let isDone = false;
  if (navigator.clipboard !== undefined) {
    isDone = await navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  if (!isDone) {
    const box = element("textarea", "off-screen");
    box.value = text;
    document.body.append(box);
    box.select();
    isDone = document.execCommand("copy");
    box.remove();
    button.focus();
  }
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  button.textContent = isDone ? "Copied" : "Not copied";
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

function codeBlock(text, language) {
  const box = element("div", "code");
  const head = element("div", "code-head");
  const copy = element("button", "quiet", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => copyText(text, copy));
  head.append(element("span", "", language || "text"), copy);
  const pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", "", text));
  box.append(head, pre);
  return box;
}
