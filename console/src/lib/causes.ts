/** Failures: whose fault they are, and what they are called. */
import type { Result } from "./api";

export const BOUNDARIES = ["engine", "harness", "agent", "runtime", "evaluator", "infrastructure"];

/** The runtime is where the sandbox fails, and is called that. */
export const boundaryName = (boundary: string): string =>
  boundary === "runtime" ? "sandbox" : boundary;

/** The cause of a failure, or its boundary where nothing more is known. */
export const causeOf = (result: Result): string =>
  result.failure ? (result.failure.cause ?? result.failure.boundary) : "";

/** A node's name: its id is the name and a number of its process. */
export const nodeName = (id: string | null | undefined): string =>
  id ? id.replace(/\.[0-9a-f]{8}$/, "") : "–";
