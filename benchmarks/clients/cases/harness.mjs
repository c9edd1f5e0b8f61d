// What the cases of every Node client have in common, as harness.py for Python.
import { inspect, isDeepStrictEqual } from "node:util";

export const URL_ = process.env.QUIRE_URL;
export const KEY = process.env.QUIRE_API_KEY;
export const MODEL = process.env.QUIRE_MODEL;
export const OPENAI_URL = `${URL_}/v1`;

export const CITY = '{"city": "Oslo", "people": 7}';
export const OSLO = { city: "Oslo", people: 7 };
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, people: { type: "integer" } },
  required: ["city", "people"],
  additionalProperties: false,
};
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const WEATHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>';
export const WEATHER_CALLS = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]';

export const WHAT = "What is in the picture?";
// A PNG in base64. The model `sights` knows what is in it.
export const RED_SQUARE =
  "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAZklEQVR4nO3PUQnAMBQEwciJfz39qZOKSGHzYJYTcLPe4a36wGkA" +
  "dQB1AHUAdQB1AHUAdQB1AHVHgGfvXwYAAAAAAAAAAAAAAAAAAAAAMAtwQwB1AHUAdQB1AHUAdQB1AHUAdeMBH0p15nvssORvAAAA" +
  "AElFTkSuQmCC";

export const say = (...turns) => `Please ~~${turns.join("||")}~~`;
export const user = (...turns) => [{ role: "user", content: say(...turns) }];

export function equal(found, expected) {
  if (!isDeepStrictEqual(found, expected)) throw new Error(`${inspect(found)} is not ${inspect(expected)}`);
}

export async function rejects(status, work) {
  try {
    await work();
  } catch (error) {
    const found = error.status ?? error.statusCode;
    if (found !== status) throw new Error(`status ${found} is not ${status}: ${error.message}`);
    return error;
  }
  throw new Error("nothing is thrown");
}

// Run every case and print a line of JSON each.
export async function main(cases) {
  for (const [name, run] of Object.entries(cases)) {
    if (process.argv.length > 2 && !process.argv.includes(name)) continue;
    let reason = null;
    try {
      await run();
    } catch (error) {
      console.error(error);
      reason = `${error.name}: ${error.message}`.slice(0, 500);
    }
    console.log(`{"case": ${JSON.stringify(name)}, "reason": ${JSON.stringify(reason)}}`);
  }
}
