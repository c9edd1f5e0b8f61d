// The `openai` package for Node.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  CITY, CITY_SCHEMA, KEY, MODEL, OPENAI_URL, OSLO, WEATHER_CALL, WEATHER_SCHEMA, equal, main, rejects, say, user,
} from "./harness.mjs";

const client = new OpenAI({ baseURL: OPENAI_URL, apiKey: KEY, maxRetries: 0 });
const tools = [{ type: "function", function: { name: "get_weather", parameters: WEATHER_SCHEMA } }];
const City = z.object({ city: z.string(), people: z.number().int() });

await main({
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: user("Hello") });
    equal([answer.choices[0].message.content, answer.choices[0].finish_reason], ["Hello", "stop"]);
  },
  async chat_stream() {
    const stream = await client.chat.completions.create({
      model: MODEL, messages: user("Hello"), stream: true, stream_options: { include_usage: true },
    });
    let [text, usage] = ["", null];
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    equal([text, usage.completion_tokens], ["Hello", 6]);
  },
  async chat_stream_helper() {
    const stream = client.chat.completions.stream({ model: MODEL, messages: user("Hello") });
    equal((await stream.finalChatCompletion()).choices[0].message.content, "Hello");
  },
  async chat_parse() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: user(CITY), response_format: zodResponseFormat(City, "city"),
    });
    equal(answer.choices[0].message.parsed, OSLO);
  },
  async chat_json_schema() {
    const answer = await client.chat.completions.create({
      model: MODEL,
      messages: user(CITY),
      response_format: { type: "json_schema", json_schema: { name: "city", schema: CITY_SCHEMA, strict: true } },
    });
    equal(answer.choices[0].message.content, CITY);
  },
  async chat_tools() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: user(WEATHER_CALL), tools });
    const [call] = answer.choices[0].message.tool_calls;
    equal([call.function.name, call.function.arguments], ["get_weather", '{"city": "Oslo"}']);
  },
  async chat_run_tools() {
    const runner = client.chat.completions.runTools({
      model: MODEL,
      messages: user(WEATHER_CALL, "It rains."),
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather", parameters: WEATHER_SCHEMA, parse: JSON.parse, function: ({ city }) => `rain in ${city}`,
          },
        },
      ],
    });
    equal(await runner.finalContent(), "It rains.");
  },
  async completion() {
    const answer = await client.completions.create({ model: MODEL, prompt: say("Hello"), max_tokens: 9, logprobs: 1 });
    equal([answer.choices[0].text, answer.choices[0].logprobs.tokens[0]], ["Hello", "H"]);
  },
  async response() {
    const answer = await client.responses.create({ model: MODEL, input: say("Hello") });
    equal([answer.output_text, answer.status], ["Hello", "completed"]);
    equal((await client.responses.retrieve(answer.id)).id, answer.id);
    await client.responses.delete(answer.id);
  },
  async response_stream() {
    const stream = client.responses.stream({ model: MODEL, input: say("Hello") });
    equal((await stream.finalResponse()).output_text, "Hello");
  },
  async response_parse() {
    const answer = await client.responses.parse({
      model: MODEL, input: say(CITY), text: { format: zodTextFormat(City, "city") },
    });
    equal(answer.output_parsed, OSLO);
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    equal(names, [MODEL]);
  },
  async errors() {
    await rejects(404, () => client.chat.completions.create({ model: "other", messages: user("a") }));
    const wrong = await rejects(400, () => client.completions.create({ model: MODEL, prompt: "a", temperature: -1 }));
    equal(wrong.param, "temperature");
    await rejects(401, () => new OpenAI({ baseURL: OPENAI_URL, apiKey: "no", maxRetries: 0 }).models.list());
  },
  async leaving_a_stream() {
    const stream = await client.completions.create({ model: MODEL, prompt: say("Hello".repeat(99)), stream: true });
    for await (const _ of stream) break;
    equal((await client.completions.create({ model: MODEL, prompt: say("Hello") })).choices[0].text, "Hello");
  },
});
