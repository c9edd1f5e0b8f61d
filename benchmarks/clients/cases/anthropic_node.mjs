// The `@anthropic-ai/sdk` package.
import Anthropic from "@anthropic-ai/sdk";
import {
  CITY, CITY_SCHEMA, KEY, MODEL, URL_, WEATHER_CALL, WEATHER_SCHEMA, equal, main, rejects, user,
} from "./harness.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const tools = [{ name: "get_weather", description: "The weather", input_schema: WEATHER_SCHEMA }];
const ask = (messages, more = {}) => client.messages.create({ model: MODEL, max_tokens: 500, messages, ...more });

await main({
  async message() {
    const answer = await ask(user("Hello"), { system: "Be brief." });
    equal([answer.content[0].text, answer.stop_reason], ["Hello", "end_turn"]);
  },
  async message_stream() {
    const stream = client.messages.stream({ model: MODEL, max_tokens: 50, messages: user("Hello") });
    let text = "";
    stream.on("text", (piece) => (text += piece));
    equal([(await stream.finalMessage()).content[0].text, text], ["Hello", "Hello"]);
  },
  async thinking() {
    const answer = await ask(user("<think>hm</think>Hello"), { thinking: { type: "adaptive" } });
    equal(answer.content.map((block) => block.type), ["thinking", "text"]);
  },
  async tools() {
    const messages = user(WEATHER_CALL, "It rains.");
    const first = await ask(messages, { tools });
    const call = first.content.find((block) => block.type === "tool_use");
    equal([call.name, call.input, first.stop_reason], ["get_weather", { city: "Oslo" }, "tool_use"]);
    messages.push({ role: "assistant", content: first.content });
    messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "rain" }] });
    equal((await ask(messages, { tools })).content[0].text, "It rains.");
  },
  async output_format() {
    const answer = await ask(user(CITY), { output_config: { format: { type: "json_schema", schema: CITY_SCHEMA } } });
    equal(answer.content[0].text, CITY);
  },
  async token_count() {
    const count = await client.messages.countTokens({ model: MODEL, messages: user("Hello") });
    equal(count.input_tokens > 10, true);
  },
  async models() {
    const names = [];
    for await (const model of client.models.list({ limit: 5 })) names.push([model.id, model.type]);
    equal(names, [[MODEL, "model"]]);
  },
  async errors() {
    await rejects(404, () => ask(user("a"), { model: "other" }));
    await rejects(400, () => ask(user("a"), { top_p: -1 }));
  },
});
