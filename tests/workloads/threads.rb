# frozen_string_literal: true

# Two threads that do different work, one that works without Ruby's lock, and
# an idle main thread.

require_relative "points"

class Alpha
  def work
    step until $stop
  end

  def step
    i = 0
    i += 1 while i < $spin
  end
end

class Beta
  def work
    [1].each { |n| other_step(n) } until $stop
  end

  def other_step(n)
    i = 0
    i += n while i < $spin
  end
end

# Copying releases the lock, and takes CPU time in the kernel: this thread runs
# while another has the lock.
class Gamma
  def work
    IO.copy_stream("/dev/zero", "/dev/null", 256 << 20) until $stop
  end
end

$started = Queue.new

def start(name, worker)
  Thread.new do
    Thread.current.name = name
    $stdout.write("thread\t#{name}\t#{Points.tid}\n")
    $started << name
    worker.work
  end
end

threads = [start("alpha", Alpha.new), start("beta", Beta.new), start("gamma", Gamma.new)]
threads.each { $started.pop }
$stdout.write("thread\tmain\t#{Points.tid}\n")
Points.ready
# Idle until the recording has seen enough.
Points.finished
$stop = true
threads.each(&:join)
