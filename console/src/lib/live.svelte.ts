/**
 * The server's events, followed while this tab is visible: browsers open at most six connections
 * to a host, which hidden tabs must not use up. A tab that becomes visible reloads its data.
 */
import { request, type Event } from "./api";
import { auth } from "./auth.svelte";

type Listener = (event: Event | null) => void;

const RETRY_MS = 2000;
const listeners = new Set<Listener>();

export const connection = $state<{ state: "live" | "connecting" | "lost" }>({
  state: "connecting",
});

/** Call `listener` with each event, and with null where some may have been missed. */
export function listen(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function notify(event: Event | null): void {
  for (const listener of listeners) listener(event);
}

/** Follow the events until the signal. */
async function follow(signal: AbortSignal): Promise<void> {
  for (let first = true; !signal.aborted; first = false) {
    try {
      const response = await request("GET", "/v1/events", { signal }, "text/event-stream");
      connection.state = "live";
      if (!first) notify(null);
      await read(response.body!.pipeThrough(new TextDecoderStream()).getReader());
    } catch {
      // shown as the state of the connection
    }
    if (signal.aborted) return;
    connection.state = "lost";
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(reader: ReadableStreamDefaultReader<string>): Promise<void> {
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop()!;
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data:"));
      if (data) notify(JSON.parse(data.slice(5)));
    }
  }
}

/** Follow the events while there is a token and the tab is visible; to be called in an effect. */
export function connect(): () => void {
  let stop = new AbortController();
  const restart = () => {
    stop.abort();
    if (document.hidden || !auth.token) return;
    stop = new AbortController();
    void follow(stop.signal);
  };
  const onVisibility = () => {
    restart();
    if (!document.hidden) notify(null);
  };
  restart();
  document.addEventListener("visibilitychange", onVisibility);
  return () => {
    stop.abort();
    document.removeEventListener("visibilitychange", onVisibility);
  };
}
