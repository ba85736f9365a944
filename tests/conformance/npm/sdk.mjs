// An agent's loop with one of the official JavaScript SDKs; says on stdout what it saw.
//     node sdk.mjs FOLDER API URL KEY        (FOLDER has the SDKs below node_modules)
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, api, url, key] = process.argv.slice(2);
const from = createRequire(`${folder}/package.json`);
const load = async (name) => import(pathToFileURL(from.resolve(name)));
const schema = { type: "object", properties: { path: { type: "string" } } };
const TURNS = 4;
const ASK = "Mend it.";

const seen = { turns: [], first: 0, models: [], counted: null, refused: null, aborted: null };

function note(text, thought, calls, input, output) {
  seen.turns.push({ text, thought, calls, input, output });
}

async function openai() {
  const { default: OpenAI } = await load("openai");
  const make = (apiKey) => new OpenAI({ apiKey, baseURL: `${url}/v1`, maxRetries: 0 });
  return { client: make(key), wrong: make("wrong") };
}

async function models(client) {
  for await (const one of client.models.list()) seen.models.push(one.id);
}

const apis = {
  async openai_chat() {
    const { client, wrong } = await openai();
    const tool = { name: "read", description: "Read", parameters: schema };
    const tools = [{ type: "function", function: tool }];
    const messages = [{ role: "developer", content: "Help." }, { role: "user", content: ASK }];
    const body = () => ({ model: "m", messages, tools, stream_options: { include_usage: true } });
    for (let turn = 0; turn < TURNS; turn++) {
      const stream = client.chat.completions.stream(body());
      stream.on("content", () => (seen.first += 1));
      const { choices, usage } = await stream.finalChatCompletion();
      const { message } = choices[0];
      const calls = (message.tool_calls ?? []).map((one) => one.function.arguments);
      const thought = message.reasoning_content ?? "";
      note(message.content, thought, calls, usage.prompt_tokens, usage.completion_tokens);
      messages.push(message);
      for (const one of message.tool_calls ?? [])
        messages.push({ role: "tool", tool_call_id: one.id, content: "x = 1" });
    }
    messages.push({ role: "user", content: "Again." });
    await models(client);
    return {
      refuse: () => wrong.chat.completions.create(body()),
      begin: () => client.chat.completions.create({ ...body(), stream: true }),
    };
  },

  async openai_responses() {
    const { client, wrong } = await openai();
    const tools = [
      { type: "function", name: "read", description: "Read", parameters: schema, strict: false },
    ];
    const input = [{ role: "developer", content: "Help." }, { role: "user", content: ASK }];
    const body = () => ({ model: "m", input, tools, store: false });
    for (let turn = 0; turn < TURNS; turn++) {
      const stream = client.responses.stream(body());
      stream.on("response.output_text.delta", () => (seen.first += 1));
      const { output, output_text: text, usage } = await stream.finalResponse();
      const asked = output.filter((item) => item.type === "function_call");
      const thoughts = output.filter((item) => item.type === "reasoning");
      const thought = thoughts.flatMap((item) => item.summary).map((one) => one.text).join("");
      note(text, thought, asked.map((one) => one.arguments), usage.input_tokens, usage.output_tokens);
      for (const { parsed_arguments, ...item } of output) input.push(item);
      for (const one of asked)
        input.push({ type: "function_call_output", call_id: one.call_id, output: "x = 1" });
    }
    input.push({ role: "user", content: "Again." });
    await models(client);
    return {
      refuse: () => wrong.responses.create(body()),
      begin: () => client.responses.create({ ...body(), stream: true }),
    };
  },

  async anthropic() {
    const { default: Anthropic } = await load("@anthropic-ai/sdk");
    const make = (apiKey) => new Anthropic({ apiKey, baseURL: url, maxRetries: 0 });
    const client = make(key);
    const tools = [{ name: "read", description: "Read", input_schema: schema }];
    const messages = [{ role: "user", content: ASK }];
    const body = () => ({ model: "m", max_tokens: 2000, system: "Help.", messages, tools });
    for (let turn = 0; turn < TURNS; turn++) {
      const stream = client.messages.stream(body());
      stream.on("text", () => (seen.first += 1));
      const { content, usage } = await stream.finalMessage();
      const of = (type) => content.filter((block) => block.type === type);
      const text = of("text").map((block) => block.text).join("");
      const thought = of("thinking").map((block) => block.thinking).join("");
      const calls = of("tool_use").map((block) => JSON.stringify(block.input));
      note(text, thought, calls, usage.input_tokens, usage.output_tokens);
      messages.push({ role: "assistant", content });
      const results = of("tool_use").map((block) => ({
        type: "tool_result", tool_use_id: block.id, content: "x = 1",
      }));
      if (results.length) messages.push({ role: "user", content: results });
    }
    messages.push({ role: "user", content: "Again." });
    const { max_tokens, ...rest } = body();
    seen.counted = (await client.messages.countTokens(rest)).input_tokens;
    await models(client);
    return {
      refuse: () => make("wrong").messages.create(body()),
      begin: () => client.messages.create({ ...body(), stream: true }),
    };
  },

  async google() {
    const { GoogleGenAI } = await load("@google/genai");
    const make = (apiKey) => new GoogleGenAI({ apiKey, httpOptions: { baseUrl: url } });
    const client = make(key);
    const declared = { name: "read", description: "Read", parametersJsonSchema: schema };
    const contents = [{ role: "user", parts: [{ text: ASK }] }];
    const body = () => ({
      model: "m", contents,
      config: {
        systemInstruction: "Help.", tools: [{ functionDeclarations: [declared] }],
        thinkingConfig: { includeThoughts: true },
      },
    });
    for (let turn = 0; turn < TURNS; turn++) {
      const parts = [];
      let usage;
      for await (const chunk of await client.models.generateContentStream(body())) {
        usage = chunk.usageMetadata ?? usage;
        parts.push(...(chunk.candidates?.[0]?.content?.parts ?? []));
      }
      const text = parts.filter((part) => part.text && !part.thought);
      seen.first += text.length;
      const thought = parts.filter((part) => part.thought).map((part) => part.text).join("");
      const asked = parts.filter((part) => part.functionCall).map((part) => part.functionCall);
      const sampled = usage.candidatesTokenCount + (usage.thoughtsTokenCount ?? 0);
      const calls = asked.map((one) => JSON.stringify(one.args));
      note(text.map((part) => part.text).join(""), thought, calls, usage.promptTokenCount, sampled);
      contents.push({ role: "model", parts });
      const results = asked.map(({ id, name }) => ({
        functionResponse: { id, name, response: { output: "x = 1" } },
      }));
      if (results.length) contents.push({ role: "user", parts: results });
    }
    contents.push({ role: "user", parts: [{ text: "Again." }] });
    seen.counted = (await client.models.countTokens({ model: "m", contents })).totalTokens;
    for await (const one of await client.models.list()) seen.models.push(one.name);
    return {
      refuse: () => make("wrong").models.generateContent(body()),
      begin: (abortSignal) => {
        const { config, ...rest } = body();
        return client.models.generateContentStream({ ...rest, config: { ...config, abortSignal } });
      },
    };
  },
};

const { refuse, begin } = await apis[api]();
try {
  await refuse();
} catch (error) {
  seen.refused = { status: error.status, message: error.message };
}
const leaving = new AbortController();
const stream = await begin(leaving.signal);
for await (const _ of stream) break; // the SDKs of OpenAI and Anthropic hang up on this alone
leaving.abort();
seen.aborted = true;
process.stdout.write(JSON.stringify(seen));
