// Conversations as the browser keeps them, and the ways out of it: files, curl and Python.

const CHATS = "quire-chats"; // the entry of the browser's storage
const MOST_CHATS = 200;
const LONGEST_TITLE = 60;
const ROLES = ["user", "assistant", "system", "tool"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const OPENAI = [...NUMBERS, "stop", "tools", "tool_choice", "response_format", "frequency_penalty", "presence_penalty", "logit_bias", "n", "reasoning_effort"];

const chats = { all: [], open: null };

function newChat() {
  const settings = chats.open?.settings ?? {};
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, messages: [], settings: { ...settings } };
}

// callId: of a tool's result, the call that it answers.
function newMessage(role, content, fields = {}) {
  return { role, content, images: [], reasoning: "", calls: [], callId: "", note: "", error: "", ...fields };
}

const titleOf = (chat) => {
  const first = chat.messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return first.length > LONGEST_TITLE ? `${first.slice(0, LONGEST_TITLE - 1)}…` : first || "New chat";
};

const textOr = (value) => (typeof value === "string" ? value : "");
const listOr = (value) => (Array.isArray(value) ? value : []);

// A conversation out of a file or of the storage, which may hold anything; null: it is none.
function readChat(found) {
  if (!Array.isArray(found?.messages)) return null;
  const settings = {};
  for (const name of Object.keys(FIELDS)) {
    const value = found.settings?.[name];
    if (typeof value === (NUMBERS.includes(name) ? "number" : "string")) settings[name] = value;
  }
  return { ...newChat(), messages: found.messages.map(readMessage).filter((message) => message !== null), settings };
}

// A message as this page keeps it or as OpenAI's API has it.
function readMessage(found) {
  const role = found?.role === "developer" ? "system" : found?.role;
  const calls = listOr(found?.calls ?? found?.tool_calls).map((call) => ({
    id: textOr(call?.id),
    name: textOr(call?.name ?? call?.function?.name),
    arguments: textOr(call?.arguments ?? call?.function?.arguments),
  }));
  const isText = typeof found?.content === "string";
  const parts = listOr(found?.content);
  if (!ROLES.includes(role) || !(isText || parts.length > 0 || calls.length > 0)) return null;
  const images = [...listOr(found.images), ...parts.map((part) => part?.image_url?.url)];
  return newMessage(role, isText ? found.content : parts.map((part) => textOr(part?.text)).filter((each) => each !== "").join("\n"), {
    images: images.filter((url) => typeof url === "string" && url.startsWith("data:image/")),
    reasoning: textOr(found.reasoning),
    calls,
    callId: textOr(found.callId ?? found.tool_call_id),
    note: textOr(found.note),
    error: textOr(found.error),
  });
}

function loadChats() {
  try {
    const found = JSON.parse(localStorage.getItem(CHATS) ?? "[]");
    const read = listOr(found).map((each) => {
      const chat = readChat(each);
      return chat && typeof each.id === "string" ? { ...chat, id: each.id } : chat;
    });
    chats.all = read.filter((chat) => chat !== null);
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

// The calls of an answer that have no result behind it yet.
function openCalls(messages) {
  const at = messages.findLastIndex((message) => message.calls.length > 0);
  const rest = messages.slice(at + 1);
  if (at < 0 || rest.some((message) => message.role !== "tool")) return [];
  return messages[at].calls.filter((call) => !rest.some((message) => message.callId === call.id));
}

// Settings of the request that have no field of their own. Raises SyntaxError.
function moreOf({ more }) {
  if ((more ?? "").trim() === "") return {};
  const found = JSON.parse(more);
  if (typeof found !== "object" || found === null || Array.isArray(found)) throw new SyntaxError("an object in braces is expected");
  return found;
}

// Left out: what failed, and answers without a word.
const isSent = ({ role, content, calls, error }) => !error && (role !== "assistant" || content !== "" || calls.length > 0);

function sentOf({ role, content, images, calls, callId }) {
  const message = { role, content: contentOf(content, images) };
  if (calls.length > 0) message.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return role === "tool" ? { ...message, tool_call_id: callId } : message;
}

// The body of the request that answers a conversation, or goes on with its last answer.
function chatBody(chat, continues = false) {
  const { system, stop, more, ...numbers } = chat.settings;
  const messages = chat.messages.filter(isSent).map(sentOf);
  const stops = (stop ?? "").split("\n").filter((line) => line !== "");
  return {
    model: state.frame?.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...numbers,
    ...(stops.length > 0 ? { stop: stops } : {}),
    ...moreOf(chat.settings),
    ...(continues ? { add_generation_prompt: false, continue_final_message: true } : {}),
  };
}

// A value whose pictures are cut, to be read.
function shortened(value) {
  return JSON.parse(JSON.stringify(value, (_, each) => (typeof each === "string" && each.startsWith("data:image/") ? `${each.slice(0, 40)}…` : each)));
}

function asCurl(path, body) {
  const quoted = JSON.stringify(shortened(body), null, 2).replaceAll("'", "'\\''");
  const url = new URL(path, location.href).href;
  return `curl ${url} \\\n  -H "Authorization: Bearer $QUIRE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

// A value of JSON as Python writes it.
function pythonOf(value, indent) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const isList = Array.isArray(value);
  const lines = Object.entries(value).map(([name, each]) => `${inner}${isList ? "" : `${JSON.stringify(name)}: `}${pythonOf(each, inner)},\n`);
  const [first, last] = isList ? "[]" : "{}";
  if (isList && value.every((each) => typeof each !== "object")) return `[${value.map((each) => pythonOf(each)).join(", ")}]`;
  return lines.length === 0 ? first + last : `${first}\n${lines.join("")}${indent}${last}`;
}

// Fields that OpenAI's client does not know go along as its extra body.
function asPython({ model, messages, ...options }) {
  const url = new URL("v1", location.href).href;
  const known = Object.entries(options).filter(([name]) => OPENAI.includes(name));
  const others = Object.entries(options).filter(([name]) => !OPENAI.includes(name));
  const given = [["model", model], ["messages", shortened(messages)], ...known, ...(others.length > 0 ? [["extra_body", Object.fromEntries(others)]] : [])];
  return `import os
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(url)}, api_key=os.environ.get("QUIRE_API_KEY", "none"))
answer = client.chat.completions.create(
${given.map(([name, value]) => `    ${name}=${pythonOf(value, "    ")},\n`).join("")})
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
  const code = element("code");
  code.append(text);
  pre.append(code);
  box.append(head, pre);
  box.grow = (more) => {
    text += more;
    code.firstChild.appendData(more);
  };
  return box;
}
