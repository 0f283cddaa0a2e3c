/* A library with the shape of a Ruby, as small as can be: what the recovery
 * from code asks of one is all there, so that the fuzzer starts from a file in
 * which everything is found. Compiled once for each seed. */
#include <stdio.h>

#ifdef EXPORTED
#define HIDDEN
#else
#define HIDDEN __attribute__((visibility("hidden")))
#endif
#define NOINLINE __attribute__((noinline, noclone))

const char ruby_version[] = "3.3.8";
const char ruby_description[] = "ruby 3.3.8 (2025-04-09 revision b200bad6cd) [x86_64-linux]";

struct thread { void *node[2]; void *self; };
struct ec { void *stack; long size; void *cfp; long fields[3]; struct thread *thread; };
HIDDEN __thread void *before[2];
HIDDEN __thread struct ec *ruby_current_ec;
HIDDEN struct { unsigned last; void *set; void **ids; } ruby_global_symbols;
HIDDEN void *ruby_current_vm_ptr;

void *rb_thread_current(void) { return ruby_current_ec->thread->self; }

NOINLINE HIDDEN void *lookup(unsigned long id) { return ruby_global_symbols.ids[id / 512]; }
void *rb_id2str(unsigned long id) { return lookup(id > 169 ? id >> 4 : id); }
void ruby_vm_at_exit(void *function) { ((void **)ruby_current_vm_ptr)[7] = function; }

/* More than 8 KB of code. */
#define ONE(n) if (x == n) { x += y * n; y ^= x >> 3; puts(ruby_version); }
#define TEN(n) ONE(n) ONE(n+1) ONE(n+2) ONE(n+3) ONE(n+4) ONE(n+5) ONE(n+6) ONE(n+7) ONE(n+8) ONE(n+9)
#define HUNDRED(n) TEN(n) TEN(n+10) TEN(n+20) TEN(n+30) TEN(n+40) TEN(n+50) TEN(n+60) TEN(n+70) TEN(n+80) TEN(n+90)
NOINLINE HIDDEN long vm_exec_core(long x) { long y = x; HUNDRED(0) HUNDRED(100) HUNDRED(200) return y; }
NOINLINE HIDDEN long get_table(void) { return vm_exec_core(0); }
NOINLINE HIDDEN long rb_vm_exec(struct ec *ec) {
    long x = vm_exec_core(ec->size), y = 1;
    TEN(0) TEN(10)
    return y;
}
NOINLINE long rb_iseq_eval(void *iseq) { puts(iseq); return rb_vm_exec(ruby_current_ec); }
long use(void) { return get_table(); }
