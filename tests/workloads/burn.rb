# Calls each method of the extension that burns CPU time, and says what came of
# it: the method, a tab, what it did. Times are microseconds of the thread's own
# CPU time.
require "burn"

def say(name, *what)
  puts [name, *what].join("\t")
end

def spent
  clock = Process::CLOCK_THREAD_CPUTIME_ID
  start = Process.clock_gettime(clock, :microsecond)
  yield
  Process.clock_gettime(clock, :microsecond) - start
end

# How often the method is on the stack.
def levels(name)
  caller_locations.count { |location| location.base_label == name }
end

module Called
  def self.back(ms)
    @levels = levels("funcall")
    Burn.cpu(ms)
  end

  def self.result
    @levels
  end
end

say "loaded", $LOADED_FEATURES.grep(/burn\.so\z/)

say "cpu", spent { Burn.cpu(10) }

ticks = 0
ticker = Thread.new { loop { ticks += 1 } }
before = ticks
own = spent { Burn.without_gvl(100) }
say "without_gvl", own, ticks > before
ticker.kill.join

rounds = []
last = nil
own = spent do
  last = Burn.with_block(5) do |round|
    rounds << round
    levels("with_block")
  end
end
say "with_block", own, rounds.join(","), last

own = spent { Burn.funcall(Called, :back, 10) }
say "funcall", own, Called.result

error = nil
own = spent { error = Burn.protect(10) { raise "protected" } }
say "protect", own, error.message, $!.inspect
say "protect without exception", Burn.protect(1000) { "fine" }
say "protect left by break", Burn.protect(1000) { break "left" }

own = spent { error = Burn.rescue(10) { raise "rescued" } }
say "rescue", own, error.message, $!.inspect

deepest = nil
descend = proc do |rest|
  if rest.zero?
    deepest = levels("nest")
    0
  else
    Burn.nest(rest, &descend)
  end
end
say "nest", Burn.nest(4, &descend), deepest

say "here", Burn.here.inspect

burnt = nil
own = spent { burnt = Burn.c_thread(50) }
say "c_thread", burnt, own < burnt

[-> { Burn.nest(1) }, -> { Burn.with_block(1) }, -> { Burn.protect(1) }, -> { Burn.rescue(1) }].each do |call|
  call.call
  say "without block", "no error"
rescue LocalJumpError
  say "without block", "refused"
end
