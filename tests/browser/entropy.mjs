// Classes of tokens and labels, by the module of colours that the first argument names.
const { colourTokens } = await import(process.argv[2]);
const surprise = [0, ...Array(10).fill(0), ...Array(10).fill(1.8), 0, 0.3, 5];
const logprobs = Float32Array.from(surprise, (value) => -value);
const spans = [[1, 21], [22, 24]].map(([start, end]) => ({ start, end }));
const trace = { ids: new Int32Array(24), logprobs, spans };
const scale = { dark: false, versions: [], advantage: null, largest: 0 };
const { classes, swatches } = colourTokens(trace, "entropy", scale);
console.log(JSON.stringify([[...classes], swatches.map(({ label }) => label)]));
