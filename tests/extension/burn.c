/*
 * Burn: a C extension that spends CPU time in known chains of C functions, for
 * tests that look at stacks of C and Ruby code in turn.
 *
 * Times are milliseconds of CPU time of the calling thread. No function of a
 * chain is inlined, cloned or left by a tail call: each does a little work after
 * the call it makes, so it is on the stack while what it called runs. All but
 * Init_burn and burn_here are known from the symbol table only, which the
 * stripped copy lacks.
 *
 * | method                        | chain, outermost first                                      |
 * |-------------------------------|-------------------------------------------------------------|
 * | cpu(ms)                       | burn_cpu, CHAIN                                             |
 * | without_gvl(ms)               | burn_without_gvl, (Ruby's), without_gvl, CHAIN              |
 * | with_block(ms) { }            | burn_with_block, block_outer, block_middle, block_leaf,     |
 * |                               | and from there the block (Ruby's rb_yield)                  |
 * | funcall(object, name, ms)     | burn_funcall, (Ruby's rb_funcall), the Ruby method          |
 * | protect(ms) { raise }         | burn_protect, handler, CHAIN                                |
 * | rescue(ms) { raise }          | burn_rescue, (Ruby's rb_rescue2), rescued, handler, CHAIN   |
 * | nest(depth) { |rest| }        | burn_nest, nest_level, (Ruby's rb_yield), the block         |
 * | here                          | burn_at, burn_here                                          |
 * | c_thread(ms)                  | of a thread without Ruby: thread_main, CHAIN                |
 *
 * CHAIN is burn_outer, burn_middle, burn_leaf.
 */

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#include <ruby.h>
#include <ruby/thread.h>

#define FRAME __attribute__((noinline, noclone))

/* Rounds of arithmetic between two looks at the clock: about 50 us, so that
 * hardly a sample meets the clock's own code. */
#define ROUNDS 100000

/* Something to do after a call, which must therefore return here. */
#define AFTER_THE_CALL() __asm__ volatile("")

static int64_t
cpu_time_ns(void)
{
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* When a thread that burns `ms` from now on is done. */
static int64_t
deadline_after(long ms)
{
    return cpu_time_ns() + (int64_t)ms * 1000000;
}

/* Burns in the function that it is written into. */
static inline __attribute__((always_inline)) void
spin_until(int64_t deadline)
{
    uint64_t value = (uint64_t)deadline | 1;
    do {
        for (int round = 0; round < ROUNDS; round++) {
            value = value * 6364136223846793005u + 1442695040888963407u;
            /* Or the compiler would do many rounds as one, or none. */
            __asm__ volatile("" : "+r"(value));
        }
    } while (cpu_time_ns() < deadline);
}

/* The chain, from its innermost function. */

static FRAME void
burn_leaf(int64_t deadline)
{
    spin_until(deadline);
}

static FRAME void
burn_middle(int64_t deadline)
{
    burn_leaf(deadline);
    AFTER_THE_CALL();
}

static FRAME void
burn_outer(int64_t deadline)
{
    burn_middle(deadline);
    AFTER_THE_CALL();
}

/* Burn.cpu(ms) */

static FRAME VALUE
burn_cpu(VALUE self, VALUE ms)
{
    burn_outer(deadline_after(NUM2LONG(ms)));
    AFTER_THE_CALL();
    return ms;
}

/* Burn.without_gvl(ms): other Ruby threads run meanwhile. */

static FRAME void *
without_gvl(void *ms)
{
    burn_outer(deadline_after(*(long *)ms));
    AFTER_THE_CALL();
    return NULL;
}

static FRAME VALUE
burn_without_gvl(VALUE self, VALUE ms)
{
    long duration = NUM2LONG(ms);
    /* In newer Rubies this is rb_nogvl. It is not to be interrupted. */
    rb_thread_call_without_gvl(without_gvl, &duration, NULL, NULL);
    AFTER_THE_CALL();
    return ms;
}

/* Burn.with_block(ms) { |round| }: in turn burns a millisecond in block_leaf and
 * calls the block from there, `ms` times. Gives what the block gave last. */

static FRAME VALUE
block_leaf(long rounds)
{
    VALUE last = Qnil;
    for (long round = 0; round < rounds; round++) {
        spin_until(deadline_after(1));
        last = rb_yield(LONG2NUM(round));
    }
    AFTER_THE_CALL();
    return last;
}

static FRAME VALUE
block_middle(long rounds)
{
    VALUE last = block_leaf(rounds);
    AFTER_THE_CALL();
    return last;
}

static FRAME VALUE
block_outer(long rounds)
{
    VALUE last = block_middle(rounds);
    AFTER_THE_CALL();
    return last;
}

static FRAME VALUE
burn_with_block(VALUE self, VALUE ms)
{
    rb_need_block();
    VALUE last = block_outer(NUM2LONG(ms));
    AFTER_THE_CALL();
    return last;
}

/* Burn.funcall(object, :name, ms): object.name(ms) */

static FRAME VALUE
burn_funcall(VALUE self, VALUE object, VALUE name, VALUE ms)
{
    VALUE result = rb_funcall(object, rb_to_id(name), 1, ms);
    AFTER_THE_CALL();
    return result;
}

/* Burn.protect(ms) { raise }: burns after the block was left by an exception,
 * and gives that. */

static FRAME void
handler(VALUE ms)
{
    burn_outer(deadline_after(NUM2LONG(ms)));
    AFTER_THE_CALL();
}

static FRAME VALUE
protected_block(VALUE unused)
{
    VALUE result = rb_yield(Qnil);
    AFTER_THE_CALL();
    return result;
}

static FRAME VALUE
burn_protect(VALUE self, VALUE ms)
{
    int state = 0;
    rb_need_block();
    VALUE result = rb_protect(protected_block, Qnil, &state);
    if (state == 0) {
        return result;
    }
    result = rb_errinfo();
    /* What is no exception, such as `break`, is no object either: it goes on. */
    if (RB_TYPE_P(result, RUBY_T_IMEMO)) {
        rb_jump_tag(state);
    }
    rb_set_errinfo(Qnil);
    handler(ms);
    AFTER_THE_CALL();
    return result;
}

/* Burn.rescue(ms) { raise }: burns while the exception is handled, and gives
 * that. */

static FRAME VALUE
rescued(VALUE ms, VALUE exception)
{
    handler(ms);
    AFTER_THE_CALL();
    return exception;
}

static FRAME VALUE
burn_rescue(VALUE self, VALUE ms)
{
    rb_need_block();
    VALUE result = rb_rescue2(protected_block, Qnil, rescued, ms, rb_eStandardError, (VALUE)0);
    AFTER_THE_CALL();
    return result;
}

/* Burn.nest(depth) { |rest| }: calls the block with depth - 1, which is to call
 * Burn.nest(rest, &itself) until nothing is left. Gives depth plus what the block
 * gives. */

static FRAME VALUE
nest_level(long depth)
{
    VALUE below = rb_yield(LONG2NUM(depth - 1));
    AFTER_THE_CALL();
    return below;
}

static FRAME VALUE
burn_nest(VALUE self, VALUE depth)
{
    rb_need_block();
    VALUE below = nest_level(NUM2LONG(depth));
    AFTER_THE_CALL();
    return LONG2NUM(NUM2LONG(depth) + NUM2LONG(below));
}

/* Burn.here: a place to stop at, by its exported name. */

__attribute__((visibility("default"))) FRAME void
burn_here(void)
{
    __asm__ volatile("");
}

static FRAME VALUE
burn_at(VALUE self)
{
    burn_here();
    AFTER_THE_CALL();
    return Qnil;
}

/* Burn.c_thread(ms): a thread that Ruby knows nothing of burns, and gives how
 * many microseconds of CPU time it spent. */

struct work {
    long ms;
    int64_t spent_ns;
    pthread_t thread;
};

static FRAME void *
thread_main(void *argument)
{
    struct work *work = argument;
    int64_t start = cpu_time_ns();
    burn_outer(deadline_after(work->ms));
    work->spent_ns = cpu_time_ns() - start;
    return NULL;
}

static FRAME void *
join(void *argument)
{
    struct work *work = argument;
    pthread_join(work->thread, NULL);
    AFTER_THE_CALL();
    return NULL;
}

static FRAME VALUE
burn_c_thread(VALUE self, VALUE ms)
{
    struct work work = {.ms = NUM2LONG(ms)};
    int error = pthread_create(&work.thread, NULL, thread_main, &work);
    if (error != 0) {
        rb_raise(rb_eRuntimeError, "no thread: error %d", error);
    }
    /* Not to be interrupted: the thread uses this stack. */
    rb_thread_call_without_gvl(join, &work, NULL, NULL);
    AFTER_THE_CALL();
    return LL2NUM(work.spent_ns / 1000);
}

__attribute__((visibility("default"))) void
Init_burn(void)
{
    VALUE burn = rb_define_module("Burn");
    rb_define_singleton_method(burn, "cpu", burn_cpu, 1);
    rb_define_singleton_method(burn, "without_gvl", burn_without_gvl, 1);
    rb_define_singleton_method(burn, "with_block", burn_with_block, 1);
    rb_define_singleton_method(burn, "funcall", burn_funcall, 3);
    rb_define_singleton_method(burn, "protect", burn_protect, 1);
    rb_define_singleton_method(burn, "rescue", burn_rescue, 1);
    rb_define_singleton_method(burn, "nest", burn_nest, 1);
    rb_define_singleton_method(burn, "here", burn_at, 0);
    rb_define_singleton_method(burn, "c_thread", burn_c_thread, 1);
}
