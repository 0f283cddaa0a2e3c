# frozen_string_literal: true

# What the programs that use the C extension `burn` have in common. They say
# `ready`, wait for a line, do their work, say what it took and `finished`, and
# wait again, so that nothing is gone before it was looked at:
#
#     spent NAME NANOSECONDS    (CPU time of a part)
module Spend
  # How much of each part is done at once, milliseconds.
  SLICE = 10
  # CPU time of the whole, milliseconds.
  CPU_MS = Integer(ENV.fetch("CPU_MS", "2000"))

  @spent = Hash.new(0)

  def self.cpu
    Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond)
  end

  # What the block takes, less what was entered meanwhile, is for that part.
  def self.on(name)
    inner = @spent.values.sum
    before = cpu
    yield
    @spent[name] += cpu - before - (@spent.values.sum - inner)
  end

  # Enters what was measured in another way.
  def self.elsewhere(name, nanoseconds)
    @spent[name] += nanoseconds
  end

  def self.over?
    @spent.values.sum >= CPU_MS * 1_000_000
  end

  def self.wait(word)
    $stdout.write("#{word}\n")
    $stdout.flush
    $stdin.gets
  end

  def self.finished
    @spent.each { |name, spent| $stdout.write("spent\t#{name}\t#{spent}\n") }
    wait("finished")
  end
end
