// Traces of a packed recording, the second argument, by the module that the first argument names.
import { readFileSync } from "node:fs";
const [module, path] = process.argv.slice(2);
const { decodeRecording } = await import(module);
const { traces, texts } = await decodeRecording(new Blob([readFileSync(path)]));
const shown = traces.map(({ ids, logprobs }) => [[...ids], [...logprobs], texts.pieces(ids)]);
console.log(JSON.stringify(shown));
