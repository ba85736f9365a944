// Orders of the rows of a table, kept in the address as `sort`: the name of a column, after "-" if
// the largest value is first.

export interface Order {
  column: string;
  falls: boolean;
}

/** The order of an address, or `otherwise` if it names none of the columns. */
export function readOrder(given: string | undefined, columns: readonly string[], otherwise: string): Order {
  const column = (given ?? "").replace(/^-/, "");
  const text = columns.includes(column) ? given! : otherwise;
  return { column: text.replace(/^-/, ""), falls: text.startsWith("-") };
}

/** Rows in an order; those without a value are last. */
export function sortRows<T>(rows: readonly T[], { column, falls }: Order, values: Record<string, (row: T) => number | string | null>): T[] {
  const value = values[column]!;
  const sign = falls ? -1 : 1;
  const compare = (a: number | string, b: number | string) => (a < b ? -sign : a > b ? sign : 0);
  return rows
    .map((row) => ({ row, key: value(row) }))
    .sort((a, b) => (a.key === null || b.key === null ? Number(a.key === null) - Number(b.key === null) : compare(a.key, b.key)))
    .map(({ row }) => row);
}

export const ariaSort = ({ column, falls }: Order, name: string): "ascending" | "descending" | undefined =>
  column !== name ? undefined : falls ? "descending" : "ascending";
