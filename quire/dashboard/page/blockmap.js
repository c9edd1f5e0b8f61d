// The block map: a canvas with one cell for each physical block, from left to right and from top to bottom, and one last
// cell for all blocks behind the last one that was ever seen in use.

const STRIPES = 4; // requests that a shared block shows

class BlockMap {
  constructor(canvas, { tallest }) {
    this.canvas = canvas;
    this.first = 1; // block 0 is the null block, which is never handed out
    this.tallest = tallest; // CSS pixels, as long as the cells stay large enough to see
    this.hues = new Float32Array(0); // of the last owner, so that what stays cached keeps a trace of its colour
    this.drawn = []; // what each cell shows, so that only cells that change are drawn
    this.last = 0; // the last block that was ever in use
  }

  // The block whose cell stands for all behind it, which were never in use.
  get rest() {
    return Math.min(this.last + 1, this.states.length - 1);
  }

  // Chooses the largest cell with which `count` blocks fit.
  layout(count) {
    const width = this.canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    if (count === this.count && width === this.width && ratio === this.ratio) return;
    this.drawn = [];
    let cell = 26;
    const rows = () => Math.ceil(count / Math.max(1, Math.floor(width / cell)));
    while (cell > 4 && rows() * cell > this.tallest) cell -= 1;
    while (cell > 3 && rows() * cell > 2 * this.tallest) cell -= 0.5;
    this.count = count;
    this.width = width;
    this.ratio = ratio;
    this.columns = Math.max(1, Math.floor(width / cell));
    this.cell = width / this.columns < cell * 1.25 ? width / this.columns : cell;
    this.gap = this.cell >= 14 ? 2 : this.cell >= 5 ? 1 : 0.5;
    this.height = Math.ceil(count / this.columns) * this.cell;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
  }

  // states: a byte a block; owners: see `state`; marked: the request to light, or null.
  draw(states, owners, marked) {
    if (this.states?.length !== states.length) this.last = 0;
    this.states = states;
    for (let block = states.length - 1; block > this.last; block--) if (states[block] !== 0) this.last = block;
    this.layout(Math.max(0, this.rest - this.first + 1));
    if (this.hues.length !== states.length) this.hues = new Float32Array(states.length).fill(-1);
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.brush = { context, free: cssColour("--free"), cached: cssColour("--cached") };
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `700 ${Math.min(12, Math.round(this.cell * 0.5))}px ${cssColour("--sans")}`;
    for (let block = this.first; block <= this.rest; block++) {
      const owned = owners.get(block);
      const isMarked = marked === null || (owned !== undefined && owned.requests.includes(marked));
      const look = lookOf(states[block], owned, isMarked);
      if (this.drawn[block] === look) continue;
      this.drawn[block] = look;
      const { x, y } = this.place(block);
      context.clearRect(x - this.gap / 2, y - this.gap / 2, this.cell, this.cell);
      context.globalAlpha = isMarked ? 1 : 0.25;
      this.drawBlock(block, states[block], owned);
    }
    context.globalAlpha = 1;
    this.drawRest();
  }

  // The last cell, where it stands for several blocks: as wide as its row, with their number.
  drawRest() {
    const count = this.states.length - this.rest;
    if (count < 2) return;
    const { context, free } = this.brush;
    const { x, y, size } = this.place(this.rest);
    context.clearRect(x, y - this.gap / 2, this.width - x, this.cell);
    context.fillStyle = free;
    context.fillRect(x, y, this.width - x - this.gap / 2, size);
    context.fillStyle = "#9a9ea8";
    context.textAlign = "left";
    const text = `${count.toLocaleString("en")} never used`;
    if (context.measureText(text).width < this.width - x - 12) context.fillText(text, x + 6, y + size / 2 + 0.5);
  }

  // After a change of colours.
  forget() {
    this.drawn = [];
  }

  drawBlock(block, value, owned) {
    const { context, free, cached } = this.brush;
    const { x, y, size } = this.place(block);
    if (value === 0) {
      this.hues[block] = -1;
      context.fillStyle = free;
      context.fillRect(x, y, size, size);
      return;
    }
    if (value === CACHED || owned === undefined) {
      const hue = this.hues[block];
      context.fillStyle = value !== CACHED ? "#8a8f99" : hue < 0 ? cached : faded(hue);
      context.fillRect(x, y, size, size);
      return;
    }
    const stripes = Math.min(owned.requests.length, STRIPES);
    const fill = this.cell >= 8 ? owned.fill : 1;
    this.hues[block] = owned.requests[0].colour.hue;
    for (let i = 0; i < stripes; i++) {
      const { colour } = owned.requests[i];
      const height = size / stripes;
      if (fill < 1) {
        context.fillStyle = unfilled(colour.hue);
        context.fillRect(x, y + i * height, size, height);
      }
      context.fillStyle = colour.lit;
      context.fillRect(x, y + i * height, size * fill, height);
    }
    if (value > 1) this.drawCount(value, x, y, size);
  }

  drawCount(value, x, y, size) {
    const { context } = this.brush;
    context.fillStyle = "#0d1012";
    if (this.cell >= 13) {
      context.fillText(value > 99 ? "…" : value, x + size / 2, y + size / 2 + 0.5);
    } else if (this.cell >= 5) {
      const dot = Math.max(2, size / 3);
      context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    }
  }

  place(block) {
    const index = block - this.first;
    const size = this.cell - this.gap;
    return {
      x: (index % this.columns) * this.cell + this.gap / 2,
      y: Math.floor(index / this.columns) * this.cell + this.gap / 2,
      size,
    };
  }

  // The block under a pointer event, or null.
  blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const row = Math.floor((event.clientY - box.top) / this.cell);
    if (this.states && row === Math.floor((this.rest - this.first) / this.columns) && column < this.columns) {
      return Math.min(row * this.columns + column + this.first, this.rest);
    }
    if (column < 0 || column >= this.columns || row < 0) return null;
    const block = row * this.columns + column + this.first;
    return this.states && block <= this.rest ? block : null;
  }

  // The block that an arrow key leads to.
  neighbour(block, key) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const to = key === "Home" ? this.first : key === "End" ? this.rest : (block ?? this.first) + steps[key];
    return to >= this.first && to <= this.rest ? to : block;
  }
}

// Two cells of the same look are drawn alike.
function lookOf(value, owned, isMarked) {
  if (owned === undefined) return isMarked ? value : value + 256;
  return `${value} ${owned.requests.map((request) => request.request_id).join()} ${owned.fill} ${isMarked}`;
}

// A frame around the block that the reader points at.
function drawCursor(map, cursor, block) {
  cursor.hidden = block === null;
  if (block === null) return;
  const { x, y, size } = map.place(block);
  Object.assign(cursor.style, { left: `${x - 2}px`, top: `${y - 2}px`, width: `${size + 4}px`, height: `${size + 4}px` });
}

function describeBlock(block) {
  const { kv } = state.frame;
  const value = kv.bytes[block];
  const last = kv.bytes.length - 1;
  if (block > deviceMap.last && block < last) return `Blocks ${block} to ${last.toLocaleString("en")} are free, and were not in use.`;
  if (value === 0) return `Block ${block} is free.`;
  if (value === CACHED) return `Block ${block} is cached: no request uses it, and a prefix can still hit it.`;
  const { entries, fill, size } = state.owners.get(block) ?? { entries: [], fill: 0, size: 0 };
  if (entries.length === 0) return `Block ${block} has ${plural(value, "owner")} besides the live requests.`;
  const shown = entries.slice(0, 6).map((entry) => {
    const sequence = entry.request.sequences.length > 1 ? ` sequence ${entry.sequence.index}` : "";
    return `${nameOf(entry.request)}${sequence}, logical ${entry.logical}`;
  });
  const more = entries.length > shown.length ? `; and ${entries.length - shown.length} more` : "";
  const slots = Math.round(fill * size);
  return `Block ${block}, ${slots} of ${size} slots filled, ${plural(value, "owner")}: ${shown.join("; ")}${more}.`;
}
