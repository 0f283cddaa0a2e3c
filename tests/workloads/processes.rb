# frozen_string_literal: true

# A process that forks, whose children fork, start threads and run a program
# that is not Ruby. With `NO_COLLECTOR` set, no garbage is collected meanwhile.
# Every process says what it is:
#
#     process NAME PID
#     cpu NAME NANOSECONDS
#
# `BUSY_MS`: CPU time of each, milliseconds. `SHELL_ROUNDS`: the work of what is not
# Ruby.

require_relative "points"

GC.disable if ENV["NO_COLLECTOR"]

BUSY_MS = Integer(ENV.fetch("BUSY_MS", "400"))
SHELL_ROUNDS = Integer(ENV.fetch("SHELL_ROUNDS", "300000"))

def busy(milliseconds)
  finish = Points.cpu + milliseconds * 1_000_000
  i = 0
  while Points.cpu < finish
    i = 0
    i += 1 while i < $spin / 10
  end
end

def announce(name)
  # One write, so that processes do not mix their lines.
  $stdout.syswrite("process\t#{name}\t#{File.readlink('/proc/self')}\n")
end

def in_beginning
  busy(BUSY_MS + 100)
end

def in_parent
  busy(BUSY_MS)
end

def in_child
  announce("child")
  busy(BUSY_MS)
  wait_for(Process.fork { in_grandchild })
end

def in_grandchild
  announce("grandchild")
  busy(BUSY_MS)
  Thread.new { in_thread_of_grandchild }.join
  # What has ended has no names any more: where reading them takes long, it stays.
  sleep(Float(ENV.fetch("LINGER", "0")))
end

def in_thread_of_grandchild
  busy(BUSY_MS)
end

def wait_for(pid)
  Process.wait(pid)
  exit!(9) unless $?.success?
end

def not_ruby
  # Work of a shell, with no other program that it would start.
  system("i=0; while [ $i -lt #{SHELL_ROUNDS} ]; do i=$((i+1)); done")
end

in_beginning
$stdout.sync = true
Points.ready if ARGV[0] == "wait"
announce("parent")
child = Process.fork { in_child }
in_parent
not_ruby
wait_for(child)
Points.finished if ARGV[0] == "wait"
exit!(Integer(ENV["STATUS"])) if ENV["STATUS"]
Process.kill(ENV["SIGNAL"], Process.pid) if ENV["SIGNAL"]
sleep if ENV["SIGNAL"]
