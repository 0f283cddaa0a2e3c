# frozen_string_literal: true

# What the programs that use the C extension `burn` have in common. They say
# `ready`, wait for a line, do their work, say what it took and `finished`, and
# wait again, so that nothing is gone before it was looked at:
#
#     spent NAME NANOSECONDS    (CPU time of a part)
module Spend
  # How much of each part is done at once, milliseconds: so much that what is done
  # between two parts (clocks read, threads made, pages touched for the first time)
  # is well below a hundredth of it all, on a busy machine too.
  SLICE = Integer(ENV.fetch("SLICE_MS", "40"))
  # CPU time of the whole, milliseconds.
  CPU_MS = Integer(ENV.fetch("CPU_MS", "2000"))

  @spent = Hash.new(0)
  @asked = 0

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

  # Also gives a sign of life, on a machine where all of this takes a while.
  def self.over?
    @asked += 1
    say("going on") if @asked % 20 == 0
    @spent.values.sum >= CPU_MS * 1_000_000
  end

  def self.say(line)
    $stdout.write("#{line}\n")
    $stdout.flush
  end

  def self.wait(word)
    say(word)
    $stdin.gets
  end

  def self.finished
    @spent.each { |name, spent| say("spent\t#{name}\t#{spent}") }
    wait("finished")
  end
end
