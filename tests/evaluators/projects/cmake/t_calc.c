int total(int a, int b);
int main(void) { return total(2, 3) != 5; }
