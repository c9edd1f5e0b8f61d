// Rates over the last two minutes, sampled once a second from the counters of the frames.

const SAMPLES = 120;
const LEAST_SPAN = 30; // samples that fill the width before there are more

const CHARTS = [
  { key: "tokens", name: "Tokens a second", hue: 195, format: (v) => (v < 10 ? v.toFixed(1) : Math.round(v).toLocaleString("en")) },
  { key: "ttft", name: "Time to first token", hue: 70, format: (v) => (v < 1 ? `${Math.round(1000 * v)} ms` : `${v.toFixed(1)} s`) },
  { key: "hits", name: "Prefix cache hits", hue: 300, format: percent, top: 1 },
  { key: "usage", name: "KV cache in use", hue: 145, format: percent, top: 1 },
];

const WINDOW = 10; // samples over which means are taken: a second may bring one request or none

const history = { counters: [], values: new Map(CHARTS.map(({ key }) => [key, []])) };

function buildCharts() {
  for (const chart of CHARTS) {
    const figure = element("figure");
    const caption = element("figcaption");
    chart.value = element("span", "value", "–");
    chart.note = element("span", "note");
    chart.canvas = element("canvas");
    chart.canvas.setAttribute("role", "img");
    caption.append(element("span", "name", chart.name), chart.value, chart.note);
    figure.append(caption, chart.canvas);
    byId("figures").append(figure);
  }
}

// Counters of a frame that rates are made of.
function countersOf(frame) {
  const { stats, time_to_first_token: first } = frame;
  return {
    at: performance.now(),
    tokens: stats.generation_tokens_total,
    prompts: stats.prompt_tokens_total,
    hits: stats.prefix_cache_hits_total,
    queries: stats.prefix_cache_queries_total,
    firstSum: first.sum,
    firstCount: first.count,
  };
}

// Called once a second while frames come.
function sample() {
  const { frame } = state;
  if (frame === null) return;
  const now = countersOf(frame);
  const before = history.counters.at(-1);
  if (before && now.tokens < before.tokens) history.counters.length = 0; // the server was started again
  history.counters.push(now);
  if (history.counters.length > WINDOW) history.counters.shift();
  if (history.counters.length > 1) {
    const [first] = history.counters;
    const ratio = (part, whole) => (now[whole] > first[whole] ? (now[part] - first[part]) / (now[whole] - first[whole]) : null);
    push("tokens", (now.tokens - before.tokens) / ((now.at - before.at) / 1000));
    push("ttft", ratio("firstSum", "firstCount"));
    push("hits", ratio("hits", "queries"));
    push("usage", usedShare(frame));
  }
  drawCharts();
}

function push(key, value) {
  const values = history.values.get(key);
  values.push(value);
  if (values.length > SAMPLES) values.shift();
}

function usedShare(frame) {
  let used = 0;
  for (const value of frame.kv.bytes) used += value > 0 && value < CACHED;
  return used / Math.max(1, frame.kv.bytes.length - 1);
}

// The newest value that there is: a second without a new request has no time to first token.
const latest = (values) => values.findLast((value) => value !== null);

function drawCharts() {
  const { frame } = state;
  for (const chart of CHARTS) {
    const values = history.values.get(chart.key);
    const value = chart.key === "usage" && frame ? usedShare(frame) : latest(values);
    chart.value.textContent = value === undefined ? "–" : chart.format(value);
    chart.note.textContent = noteOf(chart, values);
    chart.canvas.setAttribute("aria-label", `${chart.name}: ${chart.value.textContent}. ${chart.note.textContent}`);
    drawLine(chart, values);
  }
}

function noteOf(chart, values) {
  const known = values.filter((value) => value !== null);
  if (chart.key === "usage") return state.frame ? `of ${plural(state.frame.kv.bytes.length - 1, "block")}` : "";
  if (chart.key === "hits" && state.frame) {
    const { prefix_cache_hits_total: hits, prefix_cache_queries_total: queries } = state.frame.stats;
    return queries ? `${percent(hits / queries)} since the start` : "";
  }
  const peak = known.length ? `peak ${chart.format(Math.max(...known))}` : "";
  const { draft_tokens_total: drafts, accepted_draft_tokens_total: accepted } = state.frame?.stats ?? {};
  return chart.key === "tokens" && drafts ? `${peak}, ${percent(accepted / drafts)} of drafts accepted` : peak;
}

function drawLine({ canvas, hue, top }, values) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = cssColour("--line");
  context.fillRect(0, height - 1, width, 1);
  const highest = top ?? Math.max(1e-9, ...values.filter((value) => value !== null)) * 1.1;
  const span = Math.max(LEAST_SPAN, values.length) - 1;
  const x = (i) => width - 2 - ((values.length - 1 - i) * (width - 4)) / span;
  const y = (value) => height - 1.5 - (value / highest) * (height - 5);
  const points = values.map((value, i) => (value === null ? null : [x(i), y(value)])).filter(Boolean);
  if (points.length === 0) return;
  const lightness = cssColour("--chip-l");
  const colour = (alpha) => `oklch(${lightness} 0.12 ${hue} / ${alpha})`;
  context.beginPath();
  points.forEach(([px, py]) => context.lineTo(px, py));
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.strokeStyle = colour(1);
  context.stroke();
  const [last] = points.slice(-1);
  context.lineTo(last[0], height - 1);
  context.lineTo(points[0][0], height - 1);
  context.fillStyle = colour(0.14);
  context.fill();
  context.beginPath();
  context.arc(last[0], last[1], 2, 0, 2 * Math.PI);
  context.fillStyle = colour(1);
  context.fill();
}
