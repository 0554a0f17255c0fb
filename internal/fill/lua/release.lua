-- Release the lock, if it is still ours, and leave word of a failure to those who waited for it.
--
-- KEYS  1 lock
-- ARGV  1 token  2 stamp  3 failure, or ''  4 life of the word, ms
--
-- Returns 1 released, 0 not ours.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) ~= 'string' or string.sub(lock, 1, 27) ~= 'H' .. ARGV[1] then return 0 end
local ours = 0
if string.sub(lock, 28, 43) == ARGV[2] then ours = 1 end -- else granted again, to a command that came late
if ours == 1 and ARGV[3] ~= '' then
  local left = redis.pcall('SET', KEYS[1], 'F' .. ARGV[1] .. ARGV[3], 'PX', ARGV[4])
  if not left.err then return 1 end -- out of memory: the lock still has to go
end
redis.call('DEL', KEYS[1])
return ours
