// Rates over the last 15 minutes: the server's samples at first, then one a second from the counters of the frames.

const LONGEST_SPAN = 900_000; // milliseconds
const LEAST_SPAN = 30_000; // fills the width before there is more
const WINDOW = 10_000; // over which means are taken: a second may bring one request or none
const LONG_SAMPLE = 7_000; // a value that stands for more is drawn flat

const rate = (v) => (v < 10 ? v.toFixed(1) : Math.round(v).toLocaleString("en"));
const CHARTS = [
  { key: "tokens", name: "Tokens a second", hue: 195, format: rate },
  { key: "ttft", name: "Time to first token", hue: 70, format: (v) => secondsOf(v) },
  { key: "hits", name: "Prefix cache hits", hue: 300, format: percent, top: 1 },
  { key: "usage", name: "KV cache in use", hue: 145, format: percent, top: 1 },
  { key: "running", name: "Requests running", hue: 250, format: (v) => v.toLocaleString("en") },
];

// counters: what rates are made of. values: by chart, {from, at, value}, value null where there was nothing to measure.
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

// Counters of a frame's statistics or of a sample, at a time of this browser's clock.
function countersOf(stats, firstSum, firstCount, at) {
  return {
    at,
    firstSum,
    firstCount,
    tokens: stats.generation_tokens_total,
    hits: stats.prefix_cache_hits_total,
    queries: stats.prefix_cache_queries_total,
    running: stats.num_running,
    used: stats.num_used_blocks,
  };
}

// Called once a second while frames come.
function sample() {
  const { frame } = state;
  if (frame === null) return;
  const { sum, count } = frame.time_to_first_token;
  takeCounters(countersOf(frame.stats, sum, count, performance.now()));
  drawCharts();
}

// Starts again from what the server has kept of the last 15 minutes.
async function loadHistory() {
  const { samples, is_admin: isAdmin } = await (await ask("debug/kv/history")).json();
  forgetHistory();
  const now = performance.now();
  for (const each of samples) {
    takeCounters(countersOf(each, each.first_token_seconds, each.num_first_tokens, now - 1000 * each.seconds));
  }
  drawCharts();
  setAdmin(isAdmin);
}

function forgetHistory() {
  history.counters.length = 0;
  for (const values of history.values.values()) values.length = 0;
}

function takeCounters(now) {
  const before = history.counters.at(-1);
  if (before && now.at <= before.at) return;
  if (before && now.tokens < before.tokens) forgetHistory(); // the server was started again
  history.counters.push(now);
  if (history.counters.length < 2) return;
  while (history.counters[0].at < now.at - LONGEST_SPAN) history.counters.shift();
  let start = history.counters.length - 2;
  while (start > 0 && history.counters[start - 1].at >= now.at - WINDOW) start -= 1;
  const first = history.counters[Math.max(0, start)];
  const ratio = (part, whole) => (now[whole] > first[whole] ? (now[part] - first[part]) / (now[whole] - first[whole]) : null);
  push("tokens", before, now, (1000 * (now.tokens - before.tokens)) / (now.at - before.at));
  push("ttft", before, now, ratio("firstSum", "firstCount"));
  push("hits", before, now, ratio("hits", "queries"));
  push("usage", before, now, now.used / Math.max(1, state.frame.kv.bytes.length - 1));
  push("running", before, now, now.running);
}

function push(key, before, now, value) {
  const values = history.values.get(key);
  values.push({ from: before.at, at: now.at, value });
  while (values[0].at < now.at - LONGEST_SPAN) values.shift();
}

function usedShare(frame) {
  let used = 0;
  for (const value of frame.kv.bytes) used += value > 0 && value < CACHED;
  return used / Math.max(1, frame.kv.bytes.length - 1);
}

// The newest value that there is: a second without a new request has no time to first token.
function latest(chart, values) {
  if (chart.key === "usage" && state.frame) return usedShare(state.frame);
  if (chart.key === "running" && state.frame) return state.frame.stats.num_running;
  return values.findLast(({ value }) => value !== null)?.value;
}

function drawCharts() {
  const now = performance.now();
  const begun = history.counters[0]?.at ?? now;
  const span = Math.min(LONGEST_SPAN, Math.max(LEAST_SPAN, now - begun));
  byId("span").textContent = span < 120_000 ? `the last ${Math.round(span / 1000)} seconds` : `the last ${Math.round(span / 60_000)} minutes`;
  for (const chart of CHARTS) {
    const values = history.values.get(chart.key);
    const value = latest(chart, values);
    chart.value.textContent = value === undefined ? "–" : chart.format(value);
    chart.note.textContent = noteOf(chart, values);
    chart.canvas.setAttribute("aria-label", `${chart.name}: ${chart.value.textContent}. ${chart.note.textContent}`);
    drawLine(chart, values, now, span);
  }
}

function noteOf(chart, values) {
  const { frame } = state;
  if (frame && chart.key === "usage") return `of ${plural(frame.kv.bytes.length - 1, "block")}`;
  if (frame && chart.key === "running") return `${frame.stats.num_waiting.toLocaleString("en")} waiting`;
  if (frame && chart.key === "hits") {
    const { prefix_cache_hits_total: hits, prefix_cache_queries_total: queries } = frame.stats;
    return queries ? `${percent(hits / queries)} since the start` : "";
  }
  const known = values.filter(({ value }) => value !== null).map(({ value }) => value);
  const peak = known.length ? `peak ${chart.format(Math.max(...known))}` : "";
  const { draft_tokens_total: drafts, accepted_draft_tokens_total: accepted } = frame?.stats ?? {};
  return chart.key === "tokens" && drafts ? `${peak}, ${percent(accepted / drafts)} of drafts accepted` : peak;
}

function drawLine({ canvas, hue, top }, values, now, span) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = cssColour("--line");
  context.fillRect(0, height - 1, width, 1);
  const known = values.filter(({ value }) => value !== null);
  if (known.length === 0) return;
  const highest = top ?? Math.max(1e-9, ...known.map(({ value }) => value)) * 1.1;
  const x = (at) => Math.max(0, width - 2 - ((now - at) * (width - 4)) / span);
  const y = (value) => height - 1.5 - (value / highest) * (height - 5);
  const points = known.flatMap(({ from, at, value }) => (at - from > LONG_SAMPLE ? [[x(from), y(value)], [x(at), y(value)]] : [[x(at), y(value)]]));
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
