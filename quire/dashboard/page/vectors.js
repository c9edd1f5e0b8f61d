// The box of models that embed or classify: a text a line, and what the model makes of each.

const MOST_TEXTS = 32;
const NUMBERS_SHOWN = 6; // of a vector

const vectors = { route: "v1/embeddings", made: [] };

function buildVectors() {
  byId("vectors").addEventListener("submit", (event) => {
    event.preventDefault();
    runVectors();
  });
  byId("vectors").addEventListener("input", drawVectorCurl);
  byId("copy-vectors").addEventListener("click", () => copyText(JSON.stringify(vectors.made), byId("copy-vectors")));
}

function setVectors(task) {
  vectors.route = task === "embed" ? "v1/embeddings" : "classify";
  byId("vectors-title").textContent = task === "embed" ? "Embed texts" : "Classify texts";
  byId("vectors-route").textContent = `/${vectors.route}`;
  drawVectorCurl();
}

const textsOf = () => byId("texts").value.split("\n").filter((line) => line.trim() !== "").slice(0, MOST_TEXTS);

function drawVectorCurl() {
  byId("vectors-curl").textContent = asCurl(vectors.route, { model: state.frame?.model, input: textsOf() });
}

async function runVectors() {
  const texts = textsOf();
  if (texts.length === 0) return;
  byId("run-vectors").disabled = true;
  sayVectors("waiting");
  const started = performance.now();
  try {
    const response = await ask(vectors.route, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: state.frame?.model, input: texts }),
    });
    const { data, usage } = await response.json();
    vectors.made = data.map((item) => item.embedding ?? item.probs);
    drawVectors(texts, data);
    byId("copy-vectors").hidden = false;
    sayVectors(`${plural(usage.prompt_tokens, "token")} in ${secondsOf((performance.now() - started) / 1000)}`);
  } catch (error) {
    sayVectors(error.message, true);
  }
  byId("run-vectors").disabled = false;
}

function drawVectors(texts, data) {
  const isEmbedding = data[0].embedding !== undefined;
  const heads = isEmbedding ? ["Text", "Numbers", "Length", "First numbers"] : ["Text", "Label", "Probability", "All probabilities"];
  const numbersOf = (values) => `${values.slice(0, NUMBERS_SHOWN).map((value) => value.toFixed(4)).join(" ")}${values.length > NUMBERS_SHOWN ? " …" : ""}`;
  const rows = data.map(({ embedding, label, probs }, i) =>
    isEmbedding
      ? [texts[i], embedding.length.toLocaleString("en"), Math.sqrt(dot(embedding, embedding)).toFixed(3), numbersOf(embedding)]
      : [texts[i], label, percent(Math.max(...probs)), numbersOf(probs)],
  );
  const parts = [tableOf(heads, rows)];
  if (isEmbedding && data.length > 1) parts.push(element("h3", "", "Cosine similarity"), similarities(texts, vectors.made));
  byId("made").replaceChildren(...parts);
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

function similarities(texts, made) {
  const lengths = made.map((vector) => Math.sqrt(dot(vector, vector)) || 1);
  const rows = made.map((vector, i) => [texts[i], ...made.map((other, j) => (dot(vector, other) / lengths[i] / lengths[j]).toFixed(3))]);
  const wide = tableOf(["Text", ...texts.map((_, i) => `${i + 1}`)], rows);
  wide.querySelectorAll("tbody tr").forEach((row, i) => {
    [...row.cells].slice(1).forEach((cell, j) => cell.style.setProperty("--share", Math.max(0, Number(rows[i][j + 1]))));
  });
  wide.firstChild.className = "similar";
  return wide;
}

function tableOf(heads, rows) {
  const wide = element("div", "wide-table");
  wide.tabIndex = 0;
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const text of heads) head.append(Object.assign(element("th", "", text), { scope: "col" }));
  const body = table.createTBody();
  rows.forEach((cells, number) => {
    const row = body.insertRow();
    row.append(Object.assign(element("th", "", `${number + 1}. ${cells[0]}`), { scope: "row" }));
    for (const text of cells.slice(1)) row.append(element("td", "", text));
  });
  wide.append(table);
  return wide;
}

function sayVectors(text, isBad = false) {
  byId("vectors-status").textContent = text;
  byId("vectors-status").classList.toggle("bad", isBad);
}
