# frozen_string_literal: true

# A process that forks, whose children fork, start threads and run a program
# that is not Ruby. Every process says what it is:
#
#     process NAME PID
#     cpu NAME NANOSECONDS

require_relative "points"

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
  busy(500)
end

def in_parent
  busy(400)
end

def in_child
  announce("child")
  busy(400)
  wait_for(Process.fork { in_grandchild })
end

def in_grandchild
  announce("grandchild")
  busy(400)
  Thread.new { in_thread_of_grandchild }.join
end

def in_thread_of_grandchild
  busy(400)
end

def wait_for(pid)
  Process.wait(pid)
  exit!(9) unless $?.success?
end

def not_ruby
  # Work of a shell, with no other program that it would start.
  system("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
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
