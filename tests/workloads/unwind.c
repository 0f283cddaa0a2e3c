/* Stacks of every shape that C has, to be single-stepped by live_unwind.rs.
   Compiled without frame pointers, and with functions bound lazily. */
#define _GNU_SOURCE
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOINLINE __attribute__((noinline, noclone))

static volatile unsigned sink;

NOINLINE static int weigh(int it)
{
    for (int i = 0; i < 5; i++)
        sink += it;
    return it;
}

NOINLINE static void in_handler(void)
{
    for (int i = 0; i < 20; i++)
        sink += i;
}

static void handler(int signal)
{
    sink += signal;
    in_handler();
    sink++;
}

NOINLINE static void interrupted(int signal)
{
    raise(signal);
    sink++;
}

static int compare(const void *a, const void *b)
{
    int left = weigh(*(const int *)a);
    return left - weigh(*(const int *)b);
}

NOINLINE static void sorted(void)
{
    int numbers[] = { 5, 3, 9, 1, 7, 2, 8 };
    qsort(numbers, 7, sizeof *numbers, compare);
    sink += numbers[0];
}

/* Comes with any alignment and makes a frame of any size, so that its caller is
   found by a word of the frame. The last arguments are on the stack. */
NOINLINE __attribute__((force_align_arg_pointer)) static void
realigned(int n, int b, int c, int d, int e, int f, int g, int h)
{
    volatile char place[64] __attribute__((aligned(64)));
    volatile char *more = alloca(16 + n);
    place[n & 63] = more[n] = (char)(n + b + c + d + e + f + g + h);
    sink += weigh(place[n & 63]) + more[n];
}

NOINLINE static void allocated(int n)
{
    char *text = alloca(n);
    snprintf(text, n, "%d %f %s", n, n / 7.0, "text");
    sink += strlen(text) + weigh(n);
    char *copy = strdup(text);
    sink += (unsigned)strtod(copy, NULL);
    free(copy);
}

NOINLINE static void in_thread(void)
{
    weigh(3);
    sink++;
}

static void *thread(void *argument)
{
    in_thread();
    return argument;
}

int main(void)
{
    static char alternate[65536];
    stack_t stack = { .ss_sp = alternate, .ss_size = sizeof alternate };
    struct sigaction action = { .sa_handler = handler };
    sigaltstack(&stack, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGUSR2, &action, NULL);
    for (int round = 0; round < 3; round++) {
        sorted();
        realigned(round, 1, 2, 3, 4, 5, 6, 7);
        allocated(40 + round);
        interrupted(SIGUSR1);
        interrupted(SIGUSR2);
        pthread_t id;
        if (pthread_create(&id, NULL, thread, NULL) == 0)
            pthread_join(id, NULL);
    }
    return 0;
}
