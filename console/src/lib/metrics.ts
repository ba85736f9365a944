/** Prometheus metrics of the server and of the node in its process. */
import { request } from "./api";

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

export type Metrics = Map<string, Sample[]>;

const LINE = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export async function readMetrics(signal: AbortSignal): Promise<Metrics> {
  const text = await (await request("GET", "/metrics", { signal }, "text/plain")).text();
  const metrics: Metrics = new Map();
  for (const [, name, labels, value] of text.matchAll(LINE)) {
    const pairs = [...(labels ?? "").matchAll(LABEL)].map(([, key, given]) => [key!, unescape(given!)]);
    const samples = metrics.get(name!) ?? [];
    samples.push({ labels: Object.fromEntries(pairs), value: Number(value) });
    metrics.set(name!, samples);
  }
  return metrics;
}

const unescape = (text: string): string =>
  text.replace(/\\(.)/g, (_, letter: string) => (letter === "n" ? "\n" : letter));

export const sum = (samples: Sample[] = []): number =>
  samples.reduce((total, { value }) => total + value, 0);
