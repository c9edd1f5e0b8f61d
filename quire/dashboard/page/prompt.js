// The prompt box: a streamed completion of this very server.

const trial = { abort: null };

function trialBody() {
  const seed = byId("seed").value;
  return {
    prompt: byId("prompt").value,
    n: Number(byId("n").value),
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    stream: true,
  };
}

function buildPrompt() {
  byId("try").addEventListener("submit", (event) => {
    event.preventDefault();
    runTrial();
  });
  byId("stop").addEventListener("click", () => trial.abort?.abort());
  byId("try").addEventListener("input", drawCurl);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try").requestSubmit();
  });
  drawCurl();
}

function drawCurl() {
  const { stream, ...body } = trialBody();
  byId("curl").textContent = asCurl("v1/completions", body);
}

async function runTrial() {
  const body = trialBody();
  const abort = new AbortController();
  trial.abort = abort;
  byId("run").disabled = true;
  byId("stop").disabled = false;
  const outputs = makeOutputs(body.n);
  const started = performance.now();
  let count = 0;
  say("waiting for the first token");
  try {
    const response = await ask("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: abort.signal,
    });
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      colourOutputs(chunk.id);
      for (const choice of chunk.choices) {
        outputs[choice.index].text.append(choice.text);
        if (choice.finish_reason) outputs[choice.index].end.textContent = ` · ${choice.finish_reason}`;
        count += 1;
      }
      say(`${count} pieces in ${((performance.now() - started) / 1000).toFixed(1)} s`);
    }
  } catch (error) {
    say(abort.signal.aborted ? "stopped" : error.message, !abort.signal.aborted);
  } finally {
    byId("run").disabled = false;
    byId("stop").disabled = true;
  }
}

function makeOutputs(count) {
  const made = [];
  for (let index = 0; index < count; index++) {
    const part = element("div", "output");
    const line = element("p", "", count > 1 ? `completion ${index}` : "completion");
    const end = element("span");
    const text = element("pre");
    line.append(end);
    part.append(line, text);
    made.push({ part, text, end });
  }
  byId("outputs").replaceChildren(...made.map(({ part }) => part));
  return made;
}

// The colour that the request has in the map.
function colourOutputs(id) {
  if (byId("outputs").dataset.request === id) return;
  for (const request of state.requests.values()) {
    if (request.request_id.startsWith(`${id}#`)) {
      paint(byId("outputs"), request.colour);
      byId("outputs").dataset.request = id;
    }
  }
}

function say(text, isBad = false) {
  byId("try-status").textContent = text;
  byId("try-status").classList.toggle("bad", isBad);
}
