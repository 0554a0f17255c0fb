-- Abandons an attempt: gives back its lease, its reservation and its place among the waiting, and
-- refuses its commands in transit. If the mutex is free then, another waiter is woken, because this
-- attempt may have been woken for it.
--
-- KEYS  1 lock  2 ended attempts  3 reservation  4 waiting  5 fence
-- ARGV  1 token  2 life of the mark, ms  3 how many marks are kept
--       4 life of a reservation after a release, ms
--
-- Returns 1 if it released a lease, 0 if the attempt held nothing.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
local taken = 0
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  taken = 1
end
pcall(returned, redis.call, KEYS[5], ARGV[1])
if string.sub(redis.call('GET', KEYS[3]) or '', -#ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
redis.pcall('ZREM', KEYS[4], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then wakeNext(KEYS[1], KEYS[3], KEYS[4], ARGV[4], false) end
mark(redis.call, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3])
return taken
