/** The pages of the console; each is loaded when it is first opened. */
import type { Component } from "svelte";

interface Route {
  /** Pattern of the path; its groups are the page's `ids`. */
  at: RegExp;
  page: () => Promise<{ default: Component<{ ids: string[] }> | Component }>;
  /** Entry of the navigation, and its key after `g`. */
  rail?: { name: string; path: string; key: string };
}

export const routes: Route[] = [
  {
    at: /^\/$/,
    page: () => import("./pages/Overview.svelte"),
    rail: { name: "Overview", path: "/", key: "o" },
  },
  {
    at: /^\/runs$/,
    page: () => import("./pages/Runs.svelte"),
    rail: { name: "Runs", path: "/runs", key: "u" },
  },
  {
    at: /^\/training$/,
    page: () => import("./pages/Training.svelte"),
    rail: { name: "Training", path: "/training", key: "r" },
  },
  {
    at: /^\/sessions$/,
    page: () => import("./pages/Sessions.svelte"),
    rail: { name: "Sessions", path: "/sessions", key: "s" },
  },
  { at: /^\/sessions\/([^/]+)$/, page: () => import("./pages/Session.svelte") },
  { at: /^\/groups\/([^/]+)$/, page: () => import("./pages/Group.svelte") },
  { at: /^\/compare\/([^/]+)\/([^/]+)$/, page: () => import("./pages/Compare.svelte") },
  {
    at: /^\/failures$/,
    page: () => import("./pages/Failures.svelte"),
    rail: { name: "Failures", path: "/failures", key: "f" },
  },
  {
    at: /^\/tasks$/,
    page: () => import("./pages/Tasks.svelte"),
    rail: { name: "Tasks", path: "/tasks", key: "t" },
  },
  {
    at: /^\/nodes(?:\/([^/]+))?$/,
    page: () => import("./pages/Nodes.svelte"),
    rail: { name: "Nodes", path: "/nodes", key: "n" },
  },
];

export function find(path: string): { route: Route; ids: string[] } | undefined {
  for (const route of routes) {
    const match = route.at.exec(path);
    if (match) return { route, ids: match.slice(1).map((id) => decodeURIComponent(id ?? "")) };
  }
  return undefined;
}
