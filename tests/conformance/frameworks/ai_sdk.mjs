// Vercel's AI SDK: a loop of its own over each of the four APIs.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, sessions] = process.argv.slice(2);
const find = createRequire(`${folder}/`);
const load = (name) => import(pathToFileURL(find.resolve(name)));
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");

async function makeModel(url, key, api) {
  if (api === "anthropic") {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: `${url}/v1`, apiKey: key })("m");
  }
  if (api === "google") {
    const { createGoogleGenerativeAI } = await load("@ai-sdk/google");
    return createGoogleGenerativeAI({ baseURL: `${url}/v1beta`, apiKey: key })("m");
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
  return api === "openai_chat" ? openai.chat("m") : openai("m");
}

async function run(url, key, api, streamed) {
  const read = [];
  const options = {
    model: await makeModel(url, key, api),
    system: "You read.",
    prompt: "Mend it.",
    stopWhen: stepCountIs(5),
    tools: {
      read: tool({
        description: "Read a file.",
        inputSchema: z.object({ path: z.string() }),
        execute: async ({ path }) => {
          read.push(path);
          return `${path} is there`;
        },
      }),
    },
  };
  const result = streamed ? streamText(options) : await generateText(options);
  if (streamed) await result.consumeStream({ onError: (error) => { throw error; } });
  const last = (await result.steps).at(-1);
  return { text: last.text, read };
}

const reports = [];
for (const session of JSON.parse(sessions)) reports.push(await run(...session));
console.log(JSON.stringify(reports));
