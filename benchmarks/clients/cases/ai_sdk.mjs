// Vercel's AI SDK with its providers @ai-sdk/openai, @ai-sdk/openai-compatible and @ai-sdk/anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CITY, KEY, MODEL, OPENAI_URL, OSLO, WEATHER_CALL, WEATHER_CALLS, equal, main, rejects, say } from "./harness.mjs";

const openai = createOpenAI({ baseURL: OPENAI_URL, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "quire", baseURL: OPENAI_URL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: OPENAI_URL, apiKey: KEY });
const models = {
  openai_chat: openai.chat(MODEL),
  openai_responses: openai.responses(MODEL),
  compatible: compatible.chatModel(MODEL),
  anthropic: anthropic(MODEL),
};
const schema = z.object({ city: z.string(), people: z.number().int() });
const tools = {
  get_weather: tool({
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `rain in ${city}`,
  }),
};

function casesOf(name, model) {
  const ask = (turns, more = {}) => generateText({ model, prompt: say(...turns), maxRetries: 0, ...more });
  // Of an unknown model of Anthropic's the SDK asks for objects by a call that it requires.
  const call = name === "anthropic" ? (tool, input) => `[{"name": "${tool}", "parameters": ${input}}]` : null;
  const object = call ? call("json", CITY) : CITY;
  const cases = {
    async text() {
      const answer = await ask(["Hello"], { temperature: 0.5, system: "Be brief." });
      equal([answer.text, answer.finishReason], ["Hello", "stop"]);
      equal(answer.usage.outputTokens, 6);
    },
    async stream() {
      const answer = streamText({ model, prompt: say("Hello"), maxRetries: 0 });
      let text = "";
      for await (const piece of answer.textStream) text += piece;
      equal([text, await answer.finishReason], ["Hello", "stop"]);
      equal((await answer.usage).outputTokens, 6);
    },
    async tools() {
      const answer = await ask([WEATHER_CALL, "It rains."], { tools, stopWhen: stepCountIs(3) });
      equal([answer.text, answer.steps.length], ["It rains.", 2]);
    },
    async tools_stream() {
      const answer = streamText({
        model, prompt: say(WEATHER_CALL, "It rains."), tools, stopWhen: stepCountIs(3), maxRetries: 0,
      });
      equal([await answer.text, (await answer.steps).length], ["It rains.", 2]);
    },
    async tools_required() {
      const answer = await ask([WEATHER_CALLS], { tools, toolChoice: "required" });
      equal(answer.toolCalls[0].input, { city: "Oslo" });
    },
    async object() {
      equal((await ask([object], { output: Output.object({ schema }) })).output, OSLO);
    },
    async object_beside_tools() {
      const more = { tools, stopWhen: stepCountIs(3), output: Output.object({ schema }) };
      equal((await ask([call ? WEATHER_CALLS : WEATHER_CALL, object], more)).output, OSLO);
    },
    async thoughts() {
      const answer = await ask(["<think>hm</think>Hello"]);
      equal([answer.text, answer.reasoningText], ["Hello", "hm"]);
    },
  };
  // The provider of OpenAI's own models reads no thoughts of chats, and of responses only summaries.
  if (name.startsWith("openai")) delete cases.thoughts;
  return Object.fromEntries(Object.entries(cases).map(([key, run]) => [`${name}_${key}`, run]));
}

await main({
  ...Object.assign({}, ...Object.entries(models).map(([name, model]) => casesOf(name, model))),
  async compatible_completion() {
    const answer = await generateText({ model: compatible.completionModel(MODEL), prompt: say("Hello"), maxRetries: 0 });
    equal(answer.text, "Hello");
  },
  async errors() {
    const model = openai.chat("other");
    await rejects(404, () => generateText({ model, prompt: "a", maxRetries: 0 }));
  },
});
