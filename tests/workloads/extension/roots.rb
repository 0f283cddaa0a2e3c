# frozen_string_literal: true

# C code and Ruby code in everything that has a stack of its own: threads, fibers
# and, where there are any, ractors.

require "burn"
require "fiber"
require_relative "spend"

module Roots
  MS = Spend::SLICE

  def self.thread
    Thread.new { Burn.cpu(MS) }.join
  end

  # A fiber that is left from within its C code, and entered again.
  def self.fiber
    fiber = Fiber.new do
      Burn.with_block(MS) do
        spin(1)
        Fiber.yield
      end
      nil
    end
    fiber.resume while fiber.alive?
  end

  # A fiber in a thread.
  def self.both
    Thread.new do
      Fiber.new { Burn.cpu(MS) }.resume
    end.join
  end

  # Of the extension, only the main ractor may call anything.
  def self.ractor
    return unless defined?(Ractor)

    ractor = Ractor.new { Roots.spin(MS) }
    ractor.respond_to?(:value) ? ractor.value : ractor.take
  end

  # For so much of the thread's CPU time, looking at the clock now and then.
  def self.spin(milliseconds)
    finish = now + milliseconds
    while now < finish
      rounds = 5_000
      rounds -= 1 while rounds > 0
    end
  end

  def self.now
    Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :float_millisecond)
  end
end

Spend.wait("ready")
finish = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :millisecond) + Spend::CPU_MS
while Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :millisecond) < finish
  Roots.thread
  Roots.fiber
  Roots.both
  Roots.ractor
end
Spend.finished
