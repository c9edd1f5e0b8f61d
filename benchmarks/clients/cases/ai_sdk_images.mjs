// Vercel's AI SDK: pictures by its three providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import { KEY, MODEL, OPENAI_URL, RED_SQUARE, WHAT, equal, main } from "./harness.mjs";

const openai = createOpenAI({ baseURL: OPENAI_URL, apiKey: KEY });
const models = {
  openai_chat: openai.chat(MODEL),
  openai_responses: openai.responses(MODEL),
  compatible: createOpenAICompatible({ name: "quire", baseURL: OPENAI_URL, apiKey: KEY }).chatModel(MODEL),
  anthropic: createAnthropic({ baseURL: OPENAI_URL, apiKey: KEY })(MODEL),
};

async function ask(model) {
  const content = [{ type: "image", image: Buffer.from(RED_SQUARE, "base64") }, { type: "text", text: WHAT }];
  const options = { maxRetries: 0, maxOutputTokens: 20, temperature: 0 };
  const answer = await generateText({ model, messages: [{ role: "user", content }], ...options });
  equal(answer.text, "A red square.");
}

await main(Object.fromEntries(Object.entries(models).map(([name, model]) => [`${name}_picture`, () => ask(model)])));
