# frozen_string_literal: true

# Stays busy, and for each line that it is sent forks a child that sleeps, whose
# process id, as /proc has it, it prints:
#
#     child PID

require_relative "points"

class Forks
  def busy
    i = 0
    i += 1 while i < $spin
  end

  def child
    Process.fork do
      $stdout.syswrite("child\t#{File.readlink('/proc/self')}\n")
      sleep
    end
  end
end

forks = Forks.new
$stdout.syswrite("ready\n")
loop do
  forks.child if $stdin.wait_readable(0) && $stdin.gets
  forks.busy
end
