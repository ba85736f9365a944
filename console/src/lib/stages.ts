/** Stages of a session in order, in one hue from light to dark; final states have other colours. */
export const STAGES = ["init", "ready", "run", "build", "eval"] as const;
export const STATUSES = ["queued", ...STAGES, "completed", "failed", "timed_out", "cancelled"] as const;

const tint = (share: number) => `color-mix(in srgb, var(--accent) ${share}%, var(--line))`;

export const COLOURS: Record<string, string> = {
  queued: "color-mix(in srgb, var(--muted) 45%, var(--line))",
  init: tint(25),
  ready: tint(40),
  run: tint(60),
  build: tint(80),
  eval: tint(100),
  completed: "var(--good)",
  failed: "var(--bad)",
  timed_out: "color-mix(in srgb, var(--bad) 60%, var(--line))",
  cancelled: "var(--muted)",
};

/** Parts of a `Bar`, in the order of the stages. */
export const parts = (values: Record<string, number>) =>
  STATUSES.filter((name) => values[name]).map((name) => ({
    name,
    value: values[name]!,
    colour: COLOURS[name]!,
  }));
