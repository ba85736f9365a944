/** Names of failures: boundaries and causes. */
import type { Result } from "./api";

export const BOUNDARIES = ["engine", "harness", "agent", "runtime", "evaluator", "infrastructure"];

/** The boundary `runtime` is displayed as "sandbox". */
export const boundaryName = (boundary: string): string =>
  boundary === "runtime" ? "sandbox" : boundary;

/** The cause of a failure, or its boundary if the cause is unknown. */
export const causeOf = (result: Result): string =>
  result.failure ? (result.failure.cause ?? result.failure.boundary) : "";

/** A node's name, which is its id without the suffix of its process. */
export const nodeName = (id: string | null | undefined): string =>
  id ? id.replace(/\.[0-9a-f]{8}$/, "") : "–";
