// Lines of the load of engines and nodes over time.

import type { Schemas } from "./api";
import type { Line, Point } from "./chart";

type Series = Schemas["TelemetrySeries"];

export interface LoadChart {
  title: string;
  unit: string;
  lines: Line[];
  share?: boolean;
}

const STYLES: Pick<Line, "colour" | "dash">[] = [
  { colour: "accent" },
  { colour: "agent", dash: "6 3" },
  { colour: "evaluator", dash: "2 3" },
  { colour: "runtime", dash: "8 3 2 3" },
  { colour: "engine" },
  { colour: "good", dash: "6 3" },
  { colour: "bad", dash: "2 3" },
  { colour: "muted", dash: "8 3 2 3" },
];
/** Lines of a chart; of more nodes or engines, the first are drawn. */
export const MOST = STYLES.length;

function pick(series: Series, name: string, place: (at: number) => number): Point[] {
  const values = series.values[name] ?? [];
  return series.at.flatMap((at, i) => {
    const value = values[i];
    return value == null ? [] : [{ at: place(at), value }];
  });
}

/** A line for each series, named after its node or engine; after `label` if that is given. */
const each = (all: readonly Series[], name: string, place: (at: number) => number, label = ""): Line[] =>
  all.slice(0, MOST).flatMap((series) => {
    const points = pick(series, name, place);
    const own = series.engine ? series.engine.replace(/^https?:\/\//, "") : series.node;
    return points.length ? [{ label: [label, own].filter(Boolean).join(" "), colour: "", points }] : [];
  });

/** The sum of a value over all series, at each time. */
function add(all: readonly Series[], name: string, place: (at: number) => number, label: string): Line[] {
  const sums = new Map<number, number>();
  for (const series of all) for (const { at, value } of pick(series, name, place)) sums.set(at, (sums.get(at) ?? 0) + value);
  const points = [...sums].map(([at, value]) => ({ at, value })).sort((a, b) => a.at - b.at);
  return points.length ? [{ label, colour: "", points }] : [];
}

/** The charts with data. `place` is where a time, in Unix seconds, is on the axis. */
export function drawLoad(all: readonly Series[], place: (at: number) => number): LoadChart[] {
  const engines = all.filter(({ engine }) => engine);
  const nodes = all.filter(({ engine }) => !engine);
  const charts: LoadChart[] = [
    { title: "Engine tokens", unit: "per second, all engines", lines: [...add(engines, "prompt_tps", place, "prompt"), ...add(engines, "sampled_tps", place, "sampled")] },
    { title: "Requests computed", unit: "by engine", lines: each(engines, "running", place) },
    { title: "Requests queued", unit: "by engine", lines: each(engines, "waiting", place) },
    { title: "KV cache", unit: "in use, by engine", share: true, lines: each(engines, "kv", place) },
    { title: "Sessions", unit: "by node", lines: each(nodes, "sessions", place) },
    { title: "Processors", unit: "in use, by node", share: true, lines: each(nodes, "cpu", place) },
    { title: "Memory", unit: "in use, by node", share: true, lines: each(nodes, "memory", place) },
  ];
  return charts
    .filter(({ lines }) => lines.length)
    .map((chart) => ({ ...chart, lines: chart.lines.map((line, i) => ({ ...line, ...STYLES[i % MOST]! })) }));
}
