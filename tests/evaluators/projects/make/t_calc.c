#include <stdio.h>
int total(int a, int b);
int main(void) {
    int right = total(2, 3) == 5;
    printf("%sok 1 - adds\n1..1\n", right ? "" : "not ");
    return !right;
}
