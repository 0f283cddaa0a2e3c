# What an agent has to find. `script`: a short program, which executes what THEN says
# in the end. Else a server with workers, and with the titles that Puma gives itself;
# each of them burns CPU time in a method of its own name until the server is told to
# end.
$stdout.sync = true

def burn(seconds)
  start = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID)
  nil while Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) - start < seconds
end

def in_server
  burn(0.05)
end

def in_worker
  burn(0.05)
end

def in_script
  burn(Float(ENV.fetch("SECONDS")))
end

if ARGV[0] == "script"
  in_script
  following = ENV.delete("THEN")
  exec(following) if following
else
  server = Process.pid
  workers = 2.times.map do |number|
    fork do
      Process.setproctitle("puma: cluster worker #{number}: #{server} [shop]")
      # It may have been killed.
      in_worker while Process.ppid == server
      exit!(0)
    end
  end
  at_exit { workers.each { |pid| Process.kill(:KILL, pid) } }
  Process.setproctitle("puma 6.4.2 (tcp://0.0.0.0:3000) [shop]")
  workers.each { |pid| puts "worker\t#{pid}" }
  puts "ready"
  Thread.new { $stdin.gets; exit }
  loop { in_server }
end
