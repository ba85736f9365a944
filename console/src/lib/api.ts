/** Typed requests; paths, parameters and answers come from the server's OpenAPI document. */
import type { components, paths } from "../openapi";
import { auth, requireToken } from "./auth.svelte";

export type Schemas = components["schemas"];
export type Session = Schemas["SessionView"];
export type Result = Schemas["ResultView"];
export type Task = Schemas["TaskView"];
export type Node = Schemas["NodeView"];
export type Event = Schemas["Event"];
export type SessionOrder = Schemas["SessionOrder"];
export type Status = Schemas["Status"];

type Operation<P extends keyof paths, M extends "get" | "post"> = NonNullable<paths[P][M]>;
type Content<O> = O extends { responses: infer R } ? R[keyof R & (200 | 201)] : never;
type Json<O> = Content<O> extends { content: { "application/json": infer A } } ? A : undefined;
type Query<O> = O extends { parameters: { query?: infer Q } } ? Q : never;

/** An error answer of the server; status 0 means that it could not be reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    detail: string,
  ) {
    super(detail);
  }
}

interface Options<Q> {
  /** Replaces `{id}` or `{number}` in the path. */
  id?: string;
  query?: Q;
  signal?: AbortSignal;
}

interface Call extends Options<unknown> {
  body?: unknown;
}

export async function get<P extends keyof paths>(
  path: P,
  options: Options<Query<Operation<P, "get">>> = {},
): Promise<Json<Operation<P, "get">>> {
  return (await request("GET", path, options)).json();
}

export async function getText<P extends keyof paths>(
  path: P,
  options: Options<Query<Operation<P, "get">>> = {},
): Promise<string> {
  return (await request("GET", path, options, "text/plain")).text();
}

export async function post<P extends keyof paths>(
  path: P,
  options: Options<Query<Operation<P, "post">>> & { body?: unknown } = {},
): Promise<Json<Operation<P, "post">>> {
  const response = await request("POST", path, options);
  const text = await response.text(); // empty for status 204
  return JSON.parse(text || "null");
}

/** Send a request with the token. Throws `ApiError`. */
export async function request(
  method: string,
  path: string,
  options: Call = {},
  accept = "application/json",
): Promise<Response> {
  const headers: Record<string, string> = { authorization: `Bearer ${auth.token}`, accept };
  if (options.body !== undefined) headers["content-type"] = "application/json";
  const body = options.body === undefined ? undefined : JSON.stringify(options.body);
  const url = path.replace(/\{\w+\}/, encodeURIComponent(options.id ?? "")) + encode(options.query);
  let response: Response;
  try {
    response = await fetch(url, { method, headers, body, signal: options.signal, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "The server cannot be reached", "Check that `tugline up` is still running.");
  }
  auth.role = response.headers.get("tugline-role") ?? auth.role;
  if (response.ok) return response;
  const problem: Partial<Schemas["Problem"]> = await response.json().catch(() => ({}));
  const failed = new ApiError(
    response.status,
    problem.title ?? "The request failed",
    problem.detail ?? `${method} ${path} was answered ${response.status} ${response.statusText}`,
  );
  if (response.status === 401) requireToken(auth.token ? failed.message : "");
  throw failed;
}

function encode(query: unknown): string {
  const given = Object.entries(query ?? {}).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value])
      .filter((each) => each !== undefined && each !== "")
      .map((each) => [name, String(each)]),
  );
  return given.length ? `?${new URLSearchParams(given)}` : "";
}
