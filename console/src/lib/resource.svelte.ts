/** Data of the server, reloaded when the address, the token or an event requires it. */
import { untrack } from "svelte";
import { ApiError, type Event } from "./api";
import { auth } from "./auth.svelte";
import { listen } from "./live.svelte";

const SLOW_MS = 150;
const REST_MS = 500;

export class Resource<T> {
  value = $state.raw<T>();
  error = $state.raw<ApiError>();
  /** Whether loading takes long, so that a skeleton is shown. */
  slow = $state(false);
  #asked = $state(0);

  /**
   * Create in a component. `read` runs again when state changes that it uses before its first
   * await, and on events for which `concerns` is true, at most twice a second.
   */
  constructor(
    read: (signal: AbortSignal) => Promise<T>,
    concerns: (event: Event) => boolean = () => false,
  ) {
    $effect(() => {
      void [this.#asked, auth.token];
      const stop = new AbortController();
      const late = setTimeout(() => (this.slow = untrack(() => this.value) === undefined), SLOW_MS);
      read(stop.signal)
        .then((value) => {
          this.value = value;
          this.error = undefined;
        })
        .catch((error: unknown) => {
          if (stop.signal.aborted) return;
          if (!(error instanceof ApiError)) throw error;
          this.error = error;
        })
        .finally(() => {
          clearTimeout(late);
          if (!stop.signal.aborted) this.slow = false;
        });
      return () => {
        stop.abort();
        clearTimeout(late);
      };
    });
    $effect(() => {
      let rest: ReturnType<typeof setTimeout> | undefined;
      let due = false;
      const refresh = () => {
        if (rest !== undefined) return void (due = true);
        due = false;
        this.reload();
        rest = setTimeout(() => {
          rest = undefined;
          if (due) refresh();
        }, REST_MS);
      };
      const ignore = listen((event) => {
        if (event === null || concerns(event)) refresh();
      });
      return () => {
        ignore();
        clearTimeout(rest);
      };
    });
  }

  reload(): void {
    this.#asked += 1;
  }
}
