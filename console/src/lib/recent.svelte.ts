/** The results of the last half hour, from events: rates and failures need no list of sessions. */
import { get, type Event } from "./api";
import { listen } from "./live.svelte";

export const MINUTES = 30;
const PAGE = 1000;
const PAGES = 5;

export class Recent {
  results = $state.raw<Event[]>([]);
  requeued = $state.raw<Event[]>([]);

  /** Create in a component. Reads at most `PAGES * PAGE` events, then follows. */
  constructor() {
    $effect(() => {
      let ended = false;
      const ignore = listen((event) => {
        if (event) this.#add([event]);
      });
      void this.#read(() => ended).catch(() => undefined); // the page's own requests show the error
      return () => {
        ended = true;
        ignore();
      };
    });
  }

  async #read(ended: () => boolean): Promise<void> {
    const { position } = await get("/v1/status");
    let after = Math.max(0, position - PAGE * PAGES);
    while (after < position && !ended()) {
      const events = await get("/v1/events", { query: { after, limit: PAGE } });
      if (!events.length) break;
      after = events.at(-1)!.position;
      this.#add(events);
    }
  }

  #add(events: Event[]): void {
    const since = Date.now() / 1000 - 60 * MINUTES;
    const join = (known: Event[], kind: string) => {
      const added = events.filter((event) => event.kind === kind);
      if (!added.length) return known;
      const all = new Map([...known, ...added].map((event) => [event.position, event]));
      return [...all.values()].filter((event) => event.created >= since);
    };
    this.results = join(this.results, "session.result");
    this.requeued = join(this.requeued, "session.requeued");
  }
}

/** Sum of `amount` over the events of each minute, the oldest first. */
export function perMinute(
  events: Event[],
  now: number,
  amount: (event: Event) => number = () => 1,
): number[] {
  const minutes = new Array<number>(MINUTES).fill(0);
  for (const event of events) {
    const at = MINUTES - 1 - Math.floor((now - event.created) / 60);
    if (at >= 0) minutes[Math.min(at, MINUTES - 1)]! += amount(event);
  }
  return minutes;
}
