# frozen_string_literal: true

# Keeps a CPU busy at the bottom of a recursion: DEPTH calls, CPU_MS of work.

require_relative "points"

class Depth
  def down(n)
    n > 1 ? down(n - 1) : busy
  end

  def busy
    Points.ready
    wanted = Integer(ENV.fetch("CPU_MS")) * 1_000_000
    before = Points.cpu
    i = 0
    while Points.cpu - before < wanted
      i = 0
      i += 1 while i < $spin
    end
    $stdout.write("spent\t#{Points.cpu - before}\n")
    Points.finished
  end
end

Depth.new.down(Integer(ENV.fetch("DEPTH")))
