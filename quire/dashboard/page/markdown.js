// Markdown of a model as DOM nodes. Every text goes in as text: no HTML is parsed, no image is loaded, and links lead to
// http(s) and mail addresses alone. The time is linear in the text: no character is looked at more often than the bounds
// of depth and length here allow.

const DEEPEST = 12; // levels of lists, quotes and emphasis
const LONGEST_URL = 1024;
const LONGEST_MARKDOWN = 400_000; // characters; longer texts are shown as they are

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;

// Draws `text` into `target`. Of a text that has grown the last two blocks are read again: no later line changes those
// before them. Nodes whose block is the same stay, and a block of code that has grown gets the rest of its text.
function drawMarkdown(target, text) {
  if (text.length > LONGEST_MARKDOWN) return target.replaceChildren(element("pre", "", text));
  const isMore = target.text !== undefined && text.startsWith(target.text);
  const drawn = isMore ? target.drawn : [];
  const known = drawn.splice(-2);
  const start = known[0]?.place ?? 0;
  const blocks = blocksOf(text.slice(start).split("\n"), start);
  let same = 0;
  while (same < known.length && same < blocks.length && known[same].source === blocks[same].source) same += 1;
  const [old, now] = [known[same], blocks[same]];
  if (same === known.length - 1 && old.kind === "code" && now?.kind === "code" && now.language === old.language && now.text.startsWith(old.text)) {
    target.lastChild.grow(now.text.slice(old.text.length));
    same += 1;
  }
  for (let left = isMore ? known.length - same : target.childNodes.length; left > 0; left--) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(nodeOf(block, 0));
  for (const block of blocks) drawn.push(block);
  Object.assign(target, { text, drawn });
}

// `place`: of the first line in the whole text.
function blocksOf(raw, place = 0) {
  const lines = raw.map((line) => line.replace(/\r$/, "").replaceAll("\t", "    "));
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const { end, ...block } = lines[at].trim() === "" ? { end: at + 1 } : blockAt(lines, at);
    const source = raw.slice(at, end).join("\n");
    if (block.kind) blocks.push({ ...block, source, place });
    place += source.length + 1;
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fencedAt(lines, at, fence[1]);
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  const level = headingLevel(line);
  if (level > 0) return { kind: "heading", level, text: line.trim().slice(level).replace(/ #+ *$/, "").trim(), end: at + 1 };
  if (isQuote(line)) return quoteAt(lines, at);
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTable(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n").trim(), end };
}

const startsBlock = (lines, at) => {
  const line = lines[at];
  return FENCE.test(line) || RULE.test(line) || headingLevel(line) > 0 || isQuote(line) || ITEM.test(line) || isTable(lines, at);
};

function fencedAt(lines, at, mark) {
  const language = lines[at].trim().slice(mark.length).trim().split(" ", 1)[0];
  let end = at + 1;
  const closes = (line) => line.length >= mark.length && line === mark[0].repeat(line.length);
  while (end < lines.length && !closes(lines[end].trim())) end += 1;
  const last = end === lines.length && lines[end - 1] === "" ? end - 1 : end; // whose line has not begun
  return { kind: "code", language, text: lines.slice(at + 1, last).join("\n"), end: Math.min(end + 1, lines.length) };
}

const headingLevel = (line) => /^ {0,3}(#{1,6})(?: |$)/.exec(line)?.[1].length ?? 0;

const isQuote = (line) => /^ {0,3}>/.test(line);

function quoteAt(lines, at) {
  let end = at;
  const inner = [];
  while (end < lines.length && isQuote(lines[end])) {
    inner.push(lines[end].replace(/^ {0,3}> ?/, ""));
    end += 1;
  }
  return { kind: "quote", lines: inner, end };
}

function listAt(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const base = indent.length;
  const kind = mark.slice(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (line.trim() === "") {
      let next = end;
      while (next < lines.length && lines[next].trim() === "") next += 1;
      if (next === lines.length || !goesOn(lines[next], base, kind)) break;
      items.at(-1).lines.push("");
      end = next;
      continue;
    }
    const found = ITEM.exec(line);
    const depth = line.length - line.trimStart().length;
    if (found && depth <= base + 1) {
      if (depth < base || found[2].slice(-1) !== kind) break;
      items.push({ lines: [line.slice(found[0].length)], width: Math.min(found[0].length, base + 6) });
    } else if (depth > base) {
      items.at(-1).lines.push(line.slice(Math.min(depth, items.at(-1).width)));
    } else if (lines[end - 1].trim() !== "" && !startsBlock(lines, end)) {
      items.at(-1).lines.push(line);
    } else break;
    end += 1;
  }
  return { kind: "list", start: /\d/.test(mark) ? Number.parseInt(mark, 10) : null, items, end };
}

// Whether a line behind an empty one is still of a list.
function goesOn(line, base, kind) {
  const found = ITEM.exec(line);
  const depth = line.length - line.trimStart().length;
  return depth >= base + 2 || (found !== null && depth >= base && found[2].slice(-1) === kind);
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !/^[-:| ]*-[-:| ]*$/.test(lines[at + 1] ?? "")) return false;
  const rules = cellsOf(lines[at + 1]);
  return rules.length === cellsOf(lines[at]).length && rules.every((cell) => /^:?-+:?$/.test(cell));
}

function cellsOf(line) {
  const cells = line.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells;
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = [lines[at], ...lines.slice(at + 2, end)].map(cellsOf);
  const sides = cellsOf(lines[at + 1]).map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
  return { kind: "table", rows, sides, end };
}

function nodeOf(block, depth) {
  if (block.kind === "code") return codeBlock(block.text, block.language);
  if (block.kind === "rule") return element("hr");
  if (block.kind === "quote") return nested("blockquote", block.lines, depth);
  if (block.kind === "list") return listNode(block, depth);
  if (block.kind === "table") return tableNode(block);
  // Headings are below the page's own.
  return filled(block.kind === "heading" ? `h${Math.min(6, block.level + 2)}` : "p", block.text);
}

function holding(tag, nodes) {
  const made = element(tag);
  for (const node of nodes) made.append(node); // too many to be arguments of one call
  return made;
}

const filled = (tag, text) => holding(tag, new Inline(text).nodes());

function nested(tag, lines, depth) {
  if (depth >= DEEPEST) return element(tag, "", lines.join("\n"));
  const isText = (block, number) => tag === "li" && number === 0 && block.kind === "paragraph";
  return holding(tag, blocksOf(lines).flatMap((block, number) => (isText(block, number) ? new Inline(block.text).nodes() : nodeOf(block, depth + 1))));
}

function listNode(block, depth) {
  const list = element(block.start === null ? "ul" : "ol");
  if (block.start !== null && block.start !== 1) list.start = block.start;
  for (const { lines } of block.items) {
    lines[0] = lines[0].replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
    list.append(nested("li", lines, depth));
  }
  return list;
}

function tableNode({ rows, sides }) {
  const table = element("table");
  rows.forEach((cells, number) => {
    const row = element("tr");
    cells.forEach((text, column) => {
      const cell = filled(number === 0 ? "th" : "td", text);
      if (sides[column]) cell.className = sides[column];
      row.append(cell);
    });
    table.append(row);
  });
  return Object.assign(holding("div", [table]), { className: "wide-table", tabIndex: 0 });
}

// -- inside a paragraph ---------------------------------------------------------------------------------------------

const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "s" };

// One pass; `frames` are what is open: emphasis, the text of a link.
class Inline {
  constructor(text) {
    this.text = text;
    this.frames = [{ mark: "", children: [] }];
    this.plain = "";
    this.ticks = null; // length of a run of backticks -> its places, from the last to the first
  }

  nodes() {
    const { text } = this;
    for (let at = 0; at < text.length; ) at = this.step(text[at], at);
    while (this.frames.length > 1) this.flatten();
    this.flush();
    return this.frames[0].children;
  }

  step(char, at) {
    const { text } = this;
    if (char === "\\" && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) return this.say(text[at + 1], at + 2);
    if (char === "\n") return this.add(element("br"), at + 1);
    if (char === "`") return this.code(at);
    if (char === "*" || char === "_" || char === "~") return this.emphasis(char, at);
    if (char === "!" && text[at + 1] === "[" && !this.link) return this.open({ mark: "[", literal: "![", level: 0 }, at + 2);
    if (char === "[") return this.bracket(at);
    if (char === "]" && this.link) return this.close(at);
    if (char === "<") return this.angle(at);
    const isWeb = char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? " ");
    if (isWeb && !this.link) return this.address(at);
    return this.say(char, at + 1);
  }

  // The open text of a link.
  get link() {
    return this.frames.find((frame) => frame.mark === "[");
  }

  say(piece, next) {
    this.plain += piece;
    return next;
  }

  add(node, next) {
    this.flush();
    this.frames.at(-1).children.push(node);
    return next;
  }

  flush() {
    if (this.plain) this.frames.at(-1).children.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  open(frame, next) {
    if (this.frames.length > DEEPEST) return this.say(frame.literal ?? frame.mark, next);
    this.flush();
    this.frames.push({ ...frame, children: [] });
    return next;
  }

  // What was opened last is text after all.
  flatten() {
    this.flush();
    const { mark, literal, children } = this.frames.pop();
    const into = this.frames.at(-1).children;
    into.push(document.createTextNode(literal ?? mark));
    for (const child of children) into.push(child);
  }

  code(at) {
    const size = runLength(this.text, at);
    this.ticks ??= tickRuns(this.text);
    const places = this.ticks.get(size) ?? [];
    while (places.length > 0 && places.at(-1) <= at) places.pop();
    if (places.length === 0) return this.say("`".repeat(size), at + size);
    let inner = this.text.slice(at + size, places.at(-1)).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    return this.add(element("code", "", inner), places.at(-1) + size);
  }

  emphasis(char, at) {
    const { text } = this;
    let left = runLength(text, at);
    const next = at + left;
    const before = text[at - 1] ?? " ";
    const after = text[next] ?? " ";
    const isWord = /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
    const opens = after.trim() !== "" && !(char === "_" && isWord);
    const closes = before.trim() !== "" && !(char === "_" && isWord);
    while (left > 0) {
      const top = this.frames.at(-1).mark;
      const sizes = top[0] === char ? [top.length, 2, 1] : [2, 1];
      const size = sizes.find((each) => each <= left && closes && this.frames.some(({ mark }) => mark === char.repeat(each)));
      if (size !== undefined) {
        this.wrap(char.repeat(size));
        left -= size;
        continue;
      }
      const taken = Math.min(left, 2);
      const mark = char.repeat(taken);
      if (opens && mark in TAGS) this.open({ mark }, next);
      else this.say(mark, next);
      left -= taken;
    }
    return next;
  }

  wrap(mark) {
    while (this.frames.at(-1).mark !== mark) this.flatten();
    this.flush();
    const { children } = this.frames.pop();
    this.frames.at(-1).children.push(holding(TAGS[mark], children));
  }

  bracket(at) {
    const { link } = this;
    if (link === undefined) return this.open({ mark: "[", literal: "[", level: 0 }, at + 1);
    link.level += 1;
    return this.say("[", at + 1);
  }

  close(at) {
    const { link } = this;
    if (link.level > 0) {
      link.level -= 1;
      return this.say("]", at + 1);
    }
    const target = this.text[at + 1] === "(" ? destinationAt(this.text, at + 2) : null;
    while (this.frames.at(-1) !== link) this.flatten();
    if (target === null) {
      this.flatten();
      return this.say("]", at + 1);
    }
    this.flush();
    const { children, literal } = this.frames.pop();
    const isImage = literal === "![";
    if (children.length === 0) children.push(document.createTextNode(target.url));
    return this.add(anchor(target.url, isImage ? ["image: ", ...children] : children), target.end);
  }

  angle(at) {
    const piece = this.text.slice(at, at + LONGEST_URL);
    const found = /^<br ?\/?>/i.exec(piece);
    if (found) return this.add(element("br"), at + found[0].length);
    const link = this.link ? null : /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(piece);
    return link ? this.add(anchor(link[1], [link[1]]), at + link[0].length) : this.say("<", at + 1);
  }

  address(at) {
    const [url] = /^[^\s<>"`]+/.exec(this.text.slice(at, at + LONGEST_URL));
    let end = url.length;
    while (end > 0 && ".,;:!?'*_~".includes(url[end - 1])) end -= 1;
    if (!url.includes("(")) while (url[end - 1] === ")") end -= 1;
    return this.add(anchor(url.slice(0, end), [url.slice(0, end)]), at + end);
  }
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function tickRuns(text) {
  const runs = new Map();
  for (let at = text.indexOf("`"); at >= 0; ) {
    const size = runLength(text, at);
    if (!runs.has(size)) runs.set(size, []);
    runs.get(size).push(at);
    at = text.indexOf("`", at + size);
  }
  for (const places of runs.values()) places.reverse();
  return runs;
}

// The address behind `](`, up to its parenthesis: {url, end}; a title is left out.
function destinationAt(text, start) {
  const last = Math.min(text.length, start + LONGEST_URL);
  let level = 0;
  for (let at = start; at < last; at++) {
    if (text[at] === "\n") return null;
    if (text[at] === "(") level += 1;
    else if (text[at] === ")") {
      if (level === 0) return { url: text.slice(start, at).trim().split(/\s/, 1)[0].replace(/^<|>$/g, ""), end: at + 1 };
      level -= 1;
    }
  }
  return null;
}

// A link, or the text alone where the address is none of the web's or of mail.
function anchor(url, children) {
  const target = URL.canParse(url) ? new URL(url) : null;
  if (!["http:", "https:", "mailto:"].includes(target?.protocol)) return holding("span", children);
  const { href } = target;
  return Object.assign(holding("a", children), { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
