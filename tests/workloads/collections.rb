# frozen_string_literal: true

# What the garbage collector does, on whose behalf, and what runs meanwhile.
# What is printed after each phase:
#
#     phase NAME TID BEGIN END COLLECTING CPU
#
# BEGIN and END are of CLOCK_MONOTONIC, COLLECTING and CPU the CPU time of the
# garbage collector and of the whole thread in between, all in nanoseconds.

require_relative "points"

PHASE_NS = Integer(ENV.fetch("PHASE_MS", "2000")) * 1_000_000

def at_least?(major, minor)
  (RUBY_VERSION.split(".").first(2).map(&:to_i) <=> [major, minor]) >= 0
end

# For as long as a phase lasts; the block returns the time that was spent
# collecting.
def phase(name)
  begin_cpu = Points.cpu
  begin_time = Points.now
  collecting = 0
  collecting += yield while Points.cpu - begin_cpu < PHASE_NS
  cpu = Points.cpu - begin_cpu
  end_time = Points.now
  $stdout.write("phase\t#{name}\t#{Points.tid}\t#{begin_time}\t#{end_time}\t#{collecting}\t#{cpu}\n")
  $stdout.flush
end

def works
  i = 0
  i += 1 while i < $spin
end

def collects
  GC.start
end

def compacts
  GC.compact
end

def litters
  2000.times { |n| $kept[n % 1000] = [n.to_s] }
end

# Runs without the GVL, and allocates next to nothing: what it does must not be
# a reason to collect.
def outside
  IO.copy_stream("/dev/zero", "/dev/null", 256 << 20)
end

def cpu_of
  before = Points.cpu
  yield
  Points.cpu - before
end

$kept = Array.new(300_000) { |n| [n.to_s] }
stop = false
started = Queue.new
outsider = Thread.new do
  Thread.current.name = "outsider"
  $stdout.write("outsider\t#{Points.tid}\n")
  started << true
  outside until stop
end
started.pop
Points.ready

# The outsider runs meanwhile. It has no need of the collector itself: there is
# always room, and nothing is left to be swept.
phase("collects") do
  works
  cpu_of { collects }
end

stop = true
outsider.join

# Without collections but those that are asked for.
GC.disable
phase("sweeps") do
  works
  Array.new(150_000) { |n| n.to_s }
  cpu_of { collects }
end
GC.enable

# Ruby measures the time of all of its collections from 3.1 on.
if GC.respond_to?(:total_time)
  phase("litters") do
    before = GC.total_time
    litters
    GC.total_time - before
  end
end

if at_least?(3, 1)
  begin
    phase("compacts") do
      works
      cpu_of { compacts }
    end
  rescue NotImplementedError
    $stdout.write("no compaction\n")
  end
end

# Another Ractor makes garbage, while this one makes none.
if at_least?(3, 1)
  $VERBOSE = nil
  Warning[:experimental] = false
  Ractor.new do
    kept = Array.new(1000)
    n = 0
    loop do
      n += 1
      kept[n % 1000] = [n.to_s]
    end
  end
  phase("ractors") do
    works
    0
  end
end

Points.finished
exit!(0)
