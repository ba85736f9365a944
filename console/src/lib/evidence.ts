// Data of a session besides its state: tokens, recording and group.

import { get, request, type Result, type Session, type Status } from "./api";
import { mean } from "./figures";
import { decodeRecording, type Recording } from "./recording";
import { decodeTrajectory, type Trajectory } from "./trajectory";

export async function getTrajectory(id: string, signal?: AbortSignal): Promise<Trajectory> {
  const path = "/v1/sessions/{id}/trajectory";
  const response = await request("GET", path, { id, signal }, "application/x-msgpack");
  return decodeTrajectory(await response.arrayBuffer());
}

/** The recording of a session; null if it is not in the server's folder. */
export async function getRecording(id: string, signal?: AbortSignal): Promise<Recording | null> {
  const path = "/v1/sessions/{id}/recording";
  const response = await request("GET", path, { id, signal }, "application/gzip");
  return response.status === 204 ? null : decodeRecording(await response.blob());
}

const ENDS: readonly Status[] = ["completed", "failed", "timed_out", "cancelled"];

/** The state of a session, and its result once it has ended. */
export async function getSession(
  id: string,
  signal?: AbortSignal,
): Promise<{ view: Session; result: Result | null }> {
  const view = await get("/v1/sessions/{id}", { id, signal });
  const ended = ENDS.includes(view.status);
  return { view, result: ended ? await get("/v1/sessions/{id}/result", { id, signal }) : null };
}

/** Write a note on a session, in place of an earlier one; an empty one removes it. */
export async function writeNote(id: string, text: string): Promise<void> {
  await request("PUT", "/v1/sessions/{id}/note", { id, body: { text } });
}

/** All results after a position: of a task, or of all. */
export async function getResults(
  query: { task?: string[]; after?: number },
  signal?: AbortSignal,
): Promise<Result[]> {
  const found: Result[] = [];
  for (let after = query.after ?? 0; ; ) {
    const page = await get("/v1/results", { query: { ...query, after, limit: 1000 }, signal });
    found.push(...page.items);
    if (page.items.length < 1000) return found;
    after = page.cursor;
  }
}

/** Rewards of a group; advantages are differences from their mean. */
export interface Baseline {
  mean: number;
  spread: number;
  /** The largest distance of a reward from the mean. */
  largest: number;
}

/** The baseline of a group; null without any reward. */
export function baselineOf(results: readonly Result[]): Baseline | null {
  const rewards = results.flatMap((one) => (one.reward === null ? [] : [one.reward]));
  if (!rewards.length) return null;
  const level = mean(rewards);
  const distances = rewards.map((reward) => Math.abs(reward - level));
  const spread = Math.sqrt(mean(distances.map((distance) => distance ** 2)));
  return { mean: level, spread, largest: Math.max(...distances) };
}
